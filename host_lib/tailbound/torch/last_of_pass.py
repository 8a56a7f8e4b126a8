"""Which all-reduce of a backward pass is the last, where nobody says so beforehand. Pure.

DDP marks the last bucket of a step; FSDP calls its all-reduce hook module by module and says nothing. A step is
therefore expected to make the calls of the pass before it, in the same order. A pass that turns out otherwise, as the
first one does, is ended by an empty op once it is over. Ranks decide alike, since they make the same calls.
"""

from __future__ import annotations


class Passes:
    """Follows the calls of backward passes, told by the number of a module."""

    def __init__(self) -> None:
        self._plan: tuple[int, ...] = ()
        self._calls: list[int] = []
        self._open = False

    def call(self, module: int) -> bool:
        """One more all-reduce; returns whether it ends the step."""
        self._calls.append(module)
        self._open = tuple(self._calls) != self._plan
        return not self._open

    def over(self) -> bool:
        """The pass is over; returns whether its step has not ended yet, so that an empty op has to end it."""
        if self._calls:
            self._plan = tuple(self._calls)
            self._calls.clear()
        unfinished, self._open = self._open, False
        return unfinished
