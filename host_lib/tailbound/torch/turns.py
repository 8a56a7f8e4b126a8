"""Which optimizers step the model in which steps: one that is applied without computing it has the same."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import torch

#: Optimizers of one step. Weak, since the program may drop one for good (another phase of training).
_Turn: TypeAlias = "tuple[weakref.ref[torch.optim.Optimizer], ...]"
#: Steps that are remembered: a loop that repeats within half of them is known for certain.
_MOST = 32


class Turns:
    """The optimizers of the last steps. All in every step, as a rule; others alternate, or are replaced by new ones."""

    def __init__(self) -> None:
        self._turns: deque[_Turn] = deque(maxlen=_MOST)

    def note(self, optimizer: torch.optim.Optimizer, *, begins: bool) -> None:
        """``optimizer`` has stepped; ``begins``: as the first one of a step."""
        before = () if begins or not self._turns else self._turns.pop()
        held = weakref.ref(optimizer)
        self._turns.append(before if held in before else (*before, held))

    def due(self, known: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Those of ``known`` whose turn the next step is; all of them while nothing says otherwise."""
        turn = self._next()
        return [one for one in known if any(one is held() for held in turn)] or list(known)

    def _next(self) -> _Turn:
        """What came after the like of the last steps: so far back as most of them are alike, else the last one."""
        turns = list(self._turns)
        alike = {back: _alike(turns[back:][::-1], turns[:-back][::-1]) for back in range(1, len(turns))}
        back = max(alike, key=lambda one: (alike[one], -one), default=1)
        return turns[-back] if turns else ()


def _alike(mine: Sequence[_Turn], theirs: Sequence[_Turn]) -> int:
    """How many of the first are equal."""
    equal = [a == b for a, b in zip(mine, theirs, strict=True)]
    return equal.index(False) if False in equal else len(equal)
