"""What the buckets of a step say of overflows, for the gradient scaler."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tailbound.collective.op import Outcome


@dataclass(frozen=True)
class Overflow:
    """``own``: a gradient of this rank had Inf or NaN. ``void``: no rank had a part of a gradient."""

    own: bool
    void: bool


class OverflowNotes:
    """Of the step under way; noted by the transport thread, taken by the training thread at the step's end."""

    def __init__(self) -> None:
        self._own = self._void = False
        self._lock = threading.Lock()

    def note(self, outcome: Outcome) -> None:
        """Takes in what became of a bucket."""
        with self._lock:
            self._own |= outcome.abstained
            self._void |= outcome.void

    def told(self) -> Overflow:
        """What the step says so far."""
        with self._lock:
            return Overflow(self._own, self._void)

    def share(self, own: bool, void: bool) -> None:
        """Takes in what those say who average other parts of the same gradient."""
        with self._lock:
            self._own |= own
            self._void |= void

    @property
    def void(self) -> bool:
        """So far."""
        return self._void

    def take(self) -> Overflow:
        """What the step says, and begins the next one."""
        with self._lock:
            taken = Overflow(self._own, self._void)
            self._own = self._void = False
            return taken
