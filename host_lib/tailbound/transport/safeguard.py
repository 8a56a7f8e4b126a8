"""What measured loss calls for: a warning, an op that is skipped, an end. Pure.

``Safeguard``: every row has one owner, and an owner's verdict travels in the flags of its result rows: so all ranks
that have a row of it decide alike, without a word more. Loss here is what is missing of ranks that did bring rows, or
are waited for and said that they had sent them (clock-15).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

from tailbound.errors import ConfigError

#: Loss of one op, and smoothed loss, above which there is a warning.
WARN_OP, WARN_SMOOTHED = 0.10, 0.02
#: Weight of one op in the smoothed loss.
_WEIGHT = 1 / 50
#: Lost rows of one op from which on it is skipped or ends training: a small op may lose one packet.
_FEWEST = 8


class Action(IntEnum):
    """What a limit calls for; the larger wins."""

    NONE = 0
    WARN = 1
    SKIP = 2
    STOP = 3


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


@dataclass(frozen=True)
class Finding:
    """What one op came to: the action, and in words why."""

    action: Action = Action.NONE
    why: str = ""


_NOTHING = Finding()


class Safeguard:
    """Judges one stage's ops in the order in which they end."""

    def __init__(self, limits: Limits) -> None:
        self._order = ((Action.STOP, limits.stop), (Action.SKIP, limits.skip), (Action.WARN, WARN_OP))
        #: exponentially smoothed loss
        self.smoothed = 0.0

    def judge(self, expected: int, taken: int) -> Finding:
        """Judges one op.

        Args:
            expected, taken: rows of the ranks that took part, as they should be and as they came.
        """
        loss = 1 - taken / expected if expected else 0.0
        self.smoothed += (loss - self.smoothed) * _WEIGHT
        few = expected - taken < _FEWEST
        for action, limit in self._order:
            if limit is not None and loss > limit and not (few and action > Action.WARN):
                return Finding(action, f"{loss:.1%} of an op's rows lost, more than {limit:.1%}")
        if self.smoothed > WARN_SMOOTHED:
            return Finding(
                Action.WARN, f"{self.smoothed:.1%} of rows lost in the last ops, more than {WARN_SMOOTHED:.1%}"
            )
        return _NOTHING
