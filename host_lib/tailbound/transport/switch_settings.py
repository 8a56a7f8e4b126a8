"""A job's switch and cookie as the environment says them: by `tailbound switch job add`, or by the lab."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tailbound.errors import ConfigError
from tailbound.transport.settings import COOKIE, PORT, SWITCH_CODES, SWITCH_FORM, SWITCH_ROWS
from tailbound.transport.switch import ADDRESS, Switch


def switch_of(address: str | None, environment: Mapping[str, str] = os.environ) -> Switch:
    """The switch at ``address`` (``ADDRESS`` or ``ADDRESS:PORT``; default ``TAILBOUND_SWITCH``).

    Raises:
        ConfigError: none is named, or a setting cannot be.
    """
    text = address or environment.get(ADDRESS, "")
    if not text:
        raise ConfigError(f"datapath 'switch' needs the switch's address: pass switch= or set {ADDRESS}")
    host, _, port = text.partition(":")
    return Switch(
        host,
        PORT.parse(port, "port of the switch") if port else 0,
        SWITCH_ROWS.read(environment),
        SWITCH_FORM.read(environment),
        SWITCH_CODES.read(environment),
    )


def cookie_of(environment: Mapping[str, str] = os.environ) -> int:
    """The cookie that the control plane has drawn for this job; 0: none has been given.

    Raises:
        ConfigError: not a cookie.
    """
    cookie: int = COOKIE.read(environment)
    return cookie
