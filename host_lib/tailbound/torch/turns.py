"""What an iteration of the training loop is made of, learned from the last ones: passes, and which optimizers follow.

A step that is applied without computing it has the same optimizers. And an iteration may have several passes whose
gradients are averaged (SAM, a discriminator's two losses, accumulation without ``no_sync``): a rank that leaves some of
them out would be in another one than the others for ever.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Sequence
from typing import TypeAlias

import torch

#: Optimizers of one step. Weak, since the program may drop one for good (another phase of training).
Turn: TypeAlias = "tuple[weakref.ref[torch.optim.Optimizer], ...]"
#: Steps that are remembered: a loop that repeats within half of them is known for certain.
_MOST = 32
#: Iterations that have to be alike; and distances of steps, in iterations, for a loop to make one in several.
_ALIKE, _APART = 8, 5
#: Passes after which an iteration that nobody has ended is given up.
_LONGEST = 256


class Turns:
    """The optimizers of the last steps. All in every step, as a rule; others alternate, or are replaced by new ones."""

    def __init__(self) -> None:
        self._turns: deque[Turn] = deque(maxlen=_MOST)
        #: passes of the iteration that is under way, each with the optimizers that followed it
        self._open: list[Turn] = []
        #: the last iteration in which an optimizer has stepped, and passes of the last iterations
        self._last: tuple[Turn, ...] = ()
        self._lengths: deque[int] = deque(maxlen=_ALIKE)
        self._idle: int | None = None  # iterations since the last step of this loop
        self._apart: Counter[int] = Counter()  # such distances of steps, of all loops

    def passed(self, *, inside: bool = False) -> None:
        """A pass has its averages; ``inside``: within ``step(closure)`` of an optimizer."""
        if inside and self._open and not self._open[-1]:
            self._lengths.append(0)  # who evaluates several times in a step cannot make it of averages alone
        if len(self._open) == _LONGEST:
            self.split()
        if len(self._open) == _LONGEST:
            self._open.clear()
            self._lengths.append(0)
        self._open.append(())

    def note(self, optimizer: torch.optim.Optimizer, *, begins: bool) -> None:
        """``optimizer`` has stepped; ``begins``: as the first one of a step."""
        before = () if begins or not self._turns else self._turns.pop()
        held = weakref.ref(optimizer)
        self._turns.append(before if held in before else (*before, held))
        if self._open and held not in self._open[-1]:
            self._open[-1] += (held,)

    def start(self) -> None:
        """A loop begins: what was under way before is no iteration of it."""
        self._open, self._idle = [], None

    def iterate(self) -> None:
        """An iteration of the loop is over."""
        whole, self._open = tuple(self._open), []
        if self._idle is not None:
            self._idle += 1
        if any(whole):
            self._last = whole
            if self._idle is not None:
                self._apart[self._idle] += 1
            self._idle = 0
        if whole:
            self._lengths.append(len(whole))

    def split(self) -> None:
        """Where nobody says when an iteration is over it is over after the last pass that an optimizer has followed."""
        if not self._turns:  # of optimizers that are not known
            self._open.clear()
        ends = [number for number, turn in enumerate(self._open, 1) if turn]
        for begin, end in zip([0, *ends], ends, strict=False):
            self._last = tuple(self._open[begin:end])
            self._lengths.append(end - begin)
        del self._open[: max(ends, default=0)]

    @property
    def passes(self) -> int:
        """Passes of an iteration; 0: they differ from one to the next, or an optimizer makes several within a step."""
        lengths = set(self._lengths)
        if len(lengths) > 1:
            return 0
        return lengths.pop() if lengths else 1

    def iterations(self, passes: int) -> int:
        """So many passes in iterations, as near as that is known."""
        known = sum(self._lengths)
        return round(passes * len(self._lengths) / known) if known else passes

    @property
    def apart(self) -> int:
        """Iterations to a step, where they have never been others; else 1.

        A loop that leaves some steps out, at random, has many alike running sooner or later.
        """
        return next(iter(self._apart)) if len(self._apart) == 1 and self._apart.total() >= _APART else 1

    def iteration(self) -> Sequence[Turn | None]:
        """Who steps after each pass of an iteration, counted from the pass that the program is to make next.

        None: whose turn it is. No passes: not known.
        """
        if self.passes == 1:
            return [None]
        if not self.passes or len(self._last) != self.passes:
            return []
        made = len(self._open) % self.passes
        return self._last[made:] + self._last[:made]

    @property
    def begins(self) -> bool:
        """Whether the next pass begins an iteration, as far as that is known."""
        return bool(self.passes) and len(self._open) % self.passes == 0

    @property
    def shared(self) -> bool:
        """Whether no optimizer steps between the next pass and the one before or behind it, as far as that is known."""
        return self._open[-1:] == [()] or self.iteration()[:1] == ((),)

    def due(self, known: Sequence[torch.optim.Optimizer], turn: Turn | None = None) -> list[torch.optim.Optimizer]:
        """Those of ``known`` of ``turn``, or whose turn the next step is; all of them while nothing says otherwise."""
        wanted = self._next() if turn is None else turn
        return [one for one in known if any(one is held() for held in wanted)] or list(known)

    def _next(self) -> Turn:
        """What came after the like of the last steps: so far back as most of them are alike, else the last one."""
        turns = list(self._turns)
        alike = {back: _alike(turns[back:][::-1], turns[:-back][::-1]) for back in range(1, len(turns))}
        back = max(alike, key=lambda one: (alike[one], -one), default=1)
        return turns[-back] if turns else ()


def _alike(mine: Sequence[Turn], theirs: Sequence[Turn]) -> int:
    """How many of the first are equal."""
    equal = [a == b for a, b in zip(mine, theirs, strict=True)]
    return equal.index(False) if False in equal else len(equal)
