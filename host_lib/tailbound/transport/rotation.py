"""When the Hadamard rotation pays: ``auto`` mode, by measured loss with hysteresis. Pure.

The rotation spreads a lost packet thinly over many entries and costs a pass over the gradient. Where nothing is lost
it only costs (OptiReduce, NSDI'25, section 3.4, switches it likewise). The switch itself must happen at the same op on
all ranks: it travels in the agreed owner map (clock-22), this only says what one rank wishes.

A rank that measures loss marks its result rows (``Flag.LOSSY``), so that whoever proposes knows of losses that are not
its own: one rank in need is enough to keep the rotation on.
"""

from __future__ import annotations

#: Weight of one op in the smoothed loss.
WEIGHT = 1 / 100
#: Smoothed loss above which the rotation is wanted, and below which it may go.
ON_ABOVE, OFF_BELOW = 0.005, 0.0005
#: Ops without need on any rank before the rotation goes.
CALM_OPS = 200


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

    def observe(self, expected: int, delivered: int, *, rotating: bool, others: bool = False) -> bool:
        """Takes one op that is over.

        Args:
            expected, delivered: rows that should have come in both stages, and those that did in time.
            rotating: whether this op was rotated, by the agreed map.
            others: whether a result row of it was marked as lossy.

        Returns:
            ``wanted``.
        """
        missing = 1 - delivered / expected if expected else 0.0
        self.loss += (missing - self.loss) * WEIGHT
        self._rotating = rotating
        if self.mode != "auto":
            return self.wanted
        if self.lossy or others:
            self._calm, self.wanted = 0, True
        elif rotating:
            self._calm += 1
            self.wanted = self._calm < CALM_OPS
        else:
            self._calm, self.wanted = 0, False
        return self.wanted
