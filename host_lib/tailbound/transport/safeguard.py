"""What measured loss calls for: the rotation, a warning, an op that is skipped, an end. Pure.

``Safeguard``: every row has one owner, and an owner's verdict travels in the flags of its result rows: so all ranks
that have a row of it decide alike, without a word more. Loss here is what is missing of ranks that did bring rows or
said that they had sent them; an average of fewer ranks than a majority is warned of (clock-15 and clock-24).

``Rotation``: the Hadamard rotation spreads a lost packet thinly over many entries and costs a pass over the gradient.
Where nothing is lost it only costs (OptiReduce, NSDI'25, section 3.4, switches it likewise), so ``auto`` follows the
measured loss, with hysteresis. The switch itself must happen at the same op on all ranks: it travels in the agreed
owner map (clock-22), this only says what one rank wishes. A rank that measures loss marks its result rows
(``Flag.LOSSY``), so that whoever proposes knows of losses that are not its own: one rank in need is enough to keep the
rotation on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

from tailbound.errors import ConfigError

#: Loss of one op, and smoothed loss, above which there is a warning.
WARN_OP, WARN_SMOOTHED = 0.10, 0.02
#: Weight of one op in the smoothed loss, for warnings and for the rotation.
_WEIGHT, _ROTATION_WEIGHT = 1 / 50, 1 / 100
#: Smoothed loss above which the rotation is wanted, and below which it may go.
ON_ABOVE, OFF_BELOW = 0.005, 0.0005
#: Ops without need on any rank before the rotation goes.
CALM_OPS = 200


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
        skip: nobody applies the op: its average is zero and flagged ``skipped``.
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

    def __init__(self, limits: Limits, ranks: int) -> None:
        self._order = ((Action.STOP, limits.stop), (Action.SKIP, limits.skip), (Action.WARN, WARN_OP))
        self._majority = ranks // 2 + 1
        #: exponentially smoothed loss
        self.smoothed = 0.0

    def judge(self, expected: int, taken: int, contributors: int | None = None) -> Finding:
        """Judges one op.

        Args:
            expected, taken: rows of the ranks that took part, as they should be and as they came.
            contributors: ranks of which anything is in the averages, own included; None: does not matter here.
        """
        loss = 1 - taken / expected if expected else 0.0
        self.smoothed += (loss - self.smoothed) * _WEIGHT
        for action, limit in self._order:
            if limit is not None and loss > limit:
                return Finding(action, f"{loss:.1%} of an op's rows lost, more than {limit:.1%}")
        if contributors is not None and contributors < self._majority:
            return Finding(Action.WARN, f"{contributors} contributors, fewer than {self._majority}")
        if self.smoothed > WARN_SMOOTHED:
            return Finding(
                Action.WARN, f"{self.smoothed:.1%} of rows lost in the last ops, more than {WARN_SMOOTHED:.1%}"
            )
        return _NOTHING


class Rotation:
    """What this rank measures and wishes.

    Args:
        mode: True (always), False (never) or ``"auto"``.
    """

    def __init__(self, mode: bool | str) -> None:
        self.mode = mode
        #: exponentially smoothed fraction of missing rows, both stages
        self.loss = 0.0
        self._rotating = mode is not False
        self._calm = 0
        #: whether the rotation should be on from what has been measured so far
        self.wanted = mode is not False

    @property
    def lossy(self) -> bool:
        """Whether to tell the others that the rotation must come or must not go (``auto`` only)."""
        return self.mode == "auto" and self.loss > (OFF_BELOW if self._rotating else ON_ABOVE)

    def observe(self, expected: int, delivered: int, *, rotating: bool, others: bool = False) -> None:
        """Takes one op that is over.

        Args:
            expected, delivered: rows that should have come in both stages, and those that did in time.
            rotating: whether this op was rotated, by the agreed map.
            others: whether a result row of it was marked as lossy.
        """
        missing = 1 - delivered / expected if expected else 0.0
        self.loss += (missing - self.loss) * _ROTATION_WEIGHT
        self._rotating = rotating
        if self.mode == "auto":
            needed = self.lossy or others
            self._calm = self._calm + 1 if rotating and not needed else 0
            self.wanted = needed or 0 < self._calm < CALM_OPS
