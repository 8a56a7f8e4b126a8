"""Limits on measured loss: what calls for an op that is skipped, or an end. Pure.

``host_lib/core/close.c`` judges by them. Every row has one owner, and an owner's verdict travels in the flags of its
result rows: so all ranks that have a row of it decide alike, without a word more. Loss here is what is missing of ranks
that did bring rows, or are waited for and said that they had sent them (clock-15).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from tailbound.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Fractions of an op's rows beyond which an owner that lost them acts; None: never.

    Attributes:
        skip: no rank applies the op: its average is zero and flagged ``skipped``.
        stop: the next launch raises ``TransportError`` on every rank.
    """

    skip: float | None = 0.80
    stop: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"safeguard {field.name} is {value}: give a fraction of 0..1, or None for never")

    def text(self) -> str:
        """As ``TAILBOUND_SAFEGUARD`` takes it."""
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ",".join(f"{name}={'never' if value is None else value}" for name, value in given)
