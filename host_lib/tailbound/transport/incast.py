"""How many senders a receiver takes at once (OptiReduce's dynamic incast, NSDI'25 section 3.2, and clock-24).

A receiver advertises a number in every header. It is a grant: k of n senders at once is k / n of the link's speed for
each of them, so that one at once is an equal share, and all together are as fast as the link. Pure state, fed with one
sample an op.

What it advertises is always the number, also when all may send: 0 is what a receiver says that has none, and changes
nothing.

Loss alone counts, never lateness; marks (CE) are for the senders, who hear of them sooner (``transport.pace``). Loss is
what is missing although its sender has said that it is through. Loss that is always there (a bad cable) is
not for this: it is the long-run floor. Loss in a few ops only (foreign bursts) is not either: too many senders at once
are too many in every op. A fall is on trial for some ops. At the first of them that loses as much as before, the fall
was for nothing: the number goes back, and the loss before it belongs to the floor. A mean over the trial says less.
Where a cable loses in bursts, a few ops may lose a third of the usual, and senders were held back for tens of ops.
"""

from __future__ import annotations

import math

#: Loss above twice the floor and this is too much.
_TOLERATED = 1e-3
#: Ops that a decision is given to show, and how often so many good ones before one more sender is taken.
_TRIAL, _PATIENCE = 8, 4
#: A fall helps as long as no op has more than this part of the loss before it. That is judged once the loss before
#: would have cost so many rows: one row of few says little.
_HELPED, _ENOUGH = 0.7, 64
#: Weight of an op in the long-run floor.
_SLOW = 1 / 256


class Incast:
    """Own number of senders taken at once.

    Args:
        senders: peers in all; the number starts there and never exceeds it.

    Attributes:
        taken: the number.
        floor: loss that is always there.
        falls: times that the number fell.
    """

    def __init__(self, senders: int) -> None:
        self.senders = senders
        self.taken = float(senders)
        self.floor = 0.0
        self.falls = 0
        self._good = 0
        self._begin()

    @property
    def advertised(self) -> int:
        """For the header."""
        return min(255, round(self.taken))

    def follow(self, senders: int) -> None:
        """So many senders are there now."""
        if senders > 0:
            self.taken = float(senders) if self.taken >= self.senders else min(self.taken, float(senders))
            self.senders = senders

    def update(self, expected: int, lost: int) -> None:
        """One op.

        Args:
            expected: rows of senders that are through with it.
            lost: those of them that did not arrive.
        """
        if expected <= 0 or self.senders < 2:
            return
        self._expected += expected
        self._lost += lost
        self._ops += 1
        self._hit += lost > self._tolerated * expected
        if self._before is not None:
            taken, loss = self._before
            self._vain |= lost > _HELPED * loss * expected
            if self._vain and (self._ops >= _TRIAL or loss * self._expected >= _ENOUGH):
                self.taken, self.floor, self._good = min(taken, float(self.senders)), max(self.floor, loss), 0
                self._begin()
        if self._ops >= _TRIAL:
            loss, often = self._lost / self._expected, 2 * self._hit > self._ops
            self._begin()
            self._decide(loss, often=often)

    def _begin(self) -> None:
        """Counts ops from now on, with no fall on trial."""
        self._expected = self._lost = self._ops = self._hit = 0
        self._vain = False  # an op has lost as much as before the fall
        self._before: tuple[float, float] | None = None  # number and loss before the fall that is on trial

    @property
    def _tolerated(self) -> float:
        return 2 * self.floor + _TOLERATED

    def _decide(self, loss: float, *, often: bool) -> None:
        if loss > self._tolerated and often:
            self._good = 0
            if self.advertised > 1:
                self._before = self.taken, loss
                self.taken = max(1.0, math.ceil(self.taken / 2))
                self.falls += 1
            return
        if loss <= self._tolerated:
            self.floor += _TRIAL * _SLOW * (loss - self.floor)
        self._good += 1
        if self._good >= _PATIENCE:
            self.taken = min(float(self.senders), self.taken + max(1.0, self.taken // 4))
            self._good = 0


def granted(advertised: int, senders: int) -> float:
    """Share of the link's speed that each of ``senders`` may send to who advertises this (0: nothing said)."""
    return min(1.0, advertised / senders) if advertised else 1.0
