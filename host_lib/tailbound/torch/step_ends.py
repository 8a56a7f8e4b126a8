"""Which all-reduce is the last of a step, where nobody says so beforehand. Pure.

The transport numbers ops by (step, index), learns deadlines from steps of the same layout and foresees their ops
(clock-2, clock-5, clock-18). DDP's hook marks the last bucket of a step. FSDP and a process group do not, but training
repeats itself. All ranks make the same calls in the same order, so all come to the same answer without a word.

``Passes`` is told when a backward pass is over (FSDP); ``Told`` when a step is (backend, ``end_step``); ``Steps`` sees
nothing but the sequence of calls (backend, as long as nobody has said when a step is over).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from tailbound.wire.schema import OP_INDEX_BITS, OP_PER_STEP

#: Most all-reduces of a step: half of the op records of a step can be in flight.
LONGEST = OP_PER_STEP // 2
#: Most ops of the repeated part of a step, and of one all-reduce: what does not fit may come on top of a part.
MOST_OPS = (1 << OP_INDEX_BITS) // 2
#: Bucket numbers of what does not repeat begin here, and come again after so many.
ODD_FROM, ODD_ROUND = 1 << 15, 1 << OP_INDEX_BITS
#: Number of an op that only ends a step.
CLOSING = ODD_FROM - 1
#: A pattern is given up for another one if more than this share of late ops did not fit.
_UNFIT = 1 / 8


class Turn(NamedTuple):
    """Where an all-reduce belongs: number of its bucket, and whether it ends the step."""

    bucket: int
    last: bool

    @property
    def odd(self) -> bool:
        """It is no part of the pattern: nothing is carried on from or to it."""
        return self.bucket >= ODD_FROM


class _Kind(NamedTuple):
    what: Hashable
    ops: int


class Passes:
    """The all-reduces of backward passes, told by the number of a module; each is expected to be like the one before.

    A pass that turns out otherwise, as the first one does, is ended by an empty op once it is over.
    """

    def __init__(self) -> None:
        self._plan: tuple[Hashable, ...] = ()
        self._calls: list[Hashable] = []
        self._open = False

    def call(self, module: Hashable) -> bool:
        """One more all-reduce; returns whether it ends the step."""
        self._calls.append(module)
        self._open = tuple(self._calls) != self._plan
        return not self._open

    def over(self, whole: bool = True) -> bool:
        """The pass is over; returns whether its step has not ended yet, so that an empty op has to end it.

        Args:
            whole: the next one is expected to be like it, not like the one before.
        """
        if self._calls and whole:
            self._plan = tuple(self._calls)
        self._calls.clear()
        unfinished, self._open = self._open, False
        return unfinished


class Told:
    """All-reduces of steps whose ends are told: each step is expected to be like the one before, as with ``Passes``."""

    def __init__(self) -> None:
        self._passes, self._at, self._ops = Passes(), 0, 0

    def take(self, what: Hashable, ops: int = 1) -> Turn:
        """Places the next all-reduce; see ``Steps.take``."""
        last = self._passes.call((what, ops))
        self._ops += ops
        bucket, self._at = self._at, self._at + 1
        if last or self._ops >= MOST_OPS:  # or a step could not number them
            self._ops = 0
            last = True
        return Turn(bucket, last)

    def over(self) -> bool:
        """The step is over; returns whether an empty op has to end it."""
        unfinished = self._passes.over() and self._ops > 0
        self._at = self._ops = 0
        return unfinished


class Steps:
    """Cuts a sequence of all-reduces into steps: once the last 2 K are the same K twice, a step is taken to have K.

    What does not fit (a metric between two steps, the first step of a layout) is a step of its own with its own scales.

    Args:
        longest: most all-reduces of a step.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._past: deque[_Kind] = deque(maxlen=2 * longest)
        self._pattern: tuple[_Kind, ...] = ()
        self._at = 0
        self._ops = 0
        self._odd = 0
        self._fitted: deque[bool] = deque(maxlen=2 * longest)

    def take(self, what: Hashable, ops: int = 1) -> Turn:
        """Places the next all-reduce.

        Args:
            what: equal for those that may be the same one in two steps.
            ops: how many ops it is cut into, at most ``MOST_OPS``.
        """
        kind = _Kind(what, ops)
        self._past.append(kind)
        fits = bool(self._pattern) and self._pattern[self._at] == kind
        self._fitted.append(fits)
        if fits:
            return self._next(ops)
        self._at = self._ops = 0
        if self._fitted.count(False) > _UNFIT * len(self._fitted) and (found := self._repeated()):
            self._pattern = found
            self._fitted.clear()
        self._odd += 1
        return Turn(ODD_FROM + self._odd % ODD_ROUND, True)

    def over(self) -> bool:
        """Steps are told from now on; returns whether an empty op has to end the present one."""
        return self._ops > 0

    def _next(self, ops: int) -> Turn:
        bucket = self._at
        self._at = (self._at + 1) % len(self._pattern)
        self._ops += ops
        last = self._at == 0 or self._ops + self._pattern[self._at].ops > MOST_OPS
        if last:
            self._ops = 0
        return Turn(bucket, last)

    def _repeated(self) -> tuple[_Kind, ...]:
        """The shortest pattern with which the past ends twice, other than the present one; empty if there is none."""
        newest = list(reversed(self._past))
        for length in range(1, len(newest) // 2 + 1):
            if newest[:length] == newest[length : 2 * length]:
                found = tuple(reversed(newest[:length]))
                if found != self._pattern:
                    return found
        return ()
