"""Which all-reduce is the last of a step, where no rank says so beforehand. Pure.

The transport numbers ops by (step, index), learns deadlines from steps of the same layout and foresees their ops
(clock-2, clock-5, clock-18). DDP's hook marks the last bucket of a step. FSDP tells only that a backward pass is over,
and the caller of the backend that a step is (``end_step``). Training repeats itself, so a step is expected to be like
the one before. All ranks make the same calls in the same order, so all come to the same answer without a word.
"""

from __future__ import annotations

from collections.abc import Hashable


class Passes:
    """The all-reduces of passes; each pass is expected to be like the one before.

    A pass that turns out otherwise, as the first one does, is ended by an empty op once it is over.
    """

    def __init__(self) -> None:
        self._plan: tuple[Hashable, ...] = ()
        self._calls: list[Hashable] = []
        self._open = False

    def call(self, what: Hashable) -> bool:
        """One more all-reduce; returns whether it ends the step.

        Args:
            what: equal for those that may be the same one in two passes.
        """
        self._calls.append(what)
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
