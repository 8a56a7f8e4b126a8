"""What a group of the backend ``tailbound`` is asked for, as ``pg_options``."""

from __future__ import annotations

import inspect
from typing import Any

from tailbound.errors import ConfigError
from tailbound.settings.table import refuse_removed
from tailbound.torch.state import TailboundState


class BackendOptions:
    """Options of a process group of the backend ``tailbound``.

    Args:
        bounded: average floating-point all-reduces of this group in bounded time, except within ``exact()``. Otherwise
            only within ``bounded()``.
        **transport: options of ``TailboundState``, for the group's own job: ``interface``, ``deadline_ms``, ... Those
            about a model's replica have no effect.

    Raises:
        ConfigError: an option that ``TailboundState`` does not have.
    """

    def __init__(self, *, bounded: bool = False, **transport: Any) -> None:
        refuse_removed(transport)
        known = [name for name in inspect.signature(TailboundState).parameters if name != "process_group"]
        if unknown := sorted(set(transport) - set(known)):
            raise ConfigError(f"BackendOptions has no option {unknown[0]!r}: choose from bounded, {', '.join(known)}")
        self.bounded, self.transport = bool(bounded), transport

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.transport.items())
        return f"BackendOptions(bounded={self.bounded}{given})"
