"""After which step a replica stands, and whether it may be read now (clock-21).

Between the end of a step and the next change by an optimizer the parameters stand still, also while the next forward
and backward passes run: other threads read them then. Within ``step(closure)`` they do so up to its backward pass, as
the update follows that. A change waits for a reader, which compares digests of what it gives.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tailbound.transport.reliable import Refusal
from tailbound.transport.steps import step_distance


class Moment:
    """Shared by the training thread, which settles and disturbs, and the threads that read."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self.step: int | None = None  #: the last one that ended here
        self._still = False
        self.changes = 0  #: contexts of ``change``, within which the training thread is
        self._over = False

    @property
    def _readable(self) -> bool:
        return self._still and not self.changes

    def settle(self, step: int) -> None:
        """The state is that after ``step``, and stands still."""
        with self._changed:
            self.step, self._still = step, True
            self._changed.notify_all()

    def disturb(self) -> bool:
        """The state is about to change. Returns, once no thread reads, whether it stood still."""
        with self._changed:
            still, self._still = self._still, False
            return still

    @contextmanager
    def change(self) -> Iterator[None]:
        """No thread reads within the context, whatever settles there; at its end the state is as was said last."""
        with self._changed:
            self.changes += 1
        try:
            yield
        finally:
            with self._changed:
                self.changes -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Refuses everybody from now on."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @contextmanager
    def reading(self, step: int, timeout: float, *, or_later: bool = False) -> Iterator[int]:
        """Waits until the state is that after ``step``; it stays so within the context, which gets the step.

        A ``Refusal`` after ``timeout`` seconds, or where the step is past; ``or_later``: any later step will do.
        """

        def reached() -> bool:
            there = self.step is not None and step_distance(self.step, step) >= 0
            return self._over or (there and (self._readable or not or_later))

        with self._changed:
            well = self._changed.wait_for(reached, timeout)
            if self._over:
                raise Refusal("this rank is closing")
            if not well or self.step is None:
                raise Refusal(f"step {step} has not ended here yet")
            if not self._readable or (self.step != step and not or_later):
                raise Refusal(f"step {step} is past here")
            yield self.step
