"""What the buckets of a step say of overflows, for the gradient scaler."""

from __future__ import annotations

import threading
from typing import NamedTuple

from tailbound.collective.op import Outcome


class Overflow(NamedTuple):
    """``own``: a gradient of this rank had Inf or NaN. ``void``: no rank had a part of a gradient."""

    own: bool = False
    void: bool = False


class OverflowNotes:
    """Of the step under way; noted by the transport thread, taken by the training thread at the step's end."""

    def __init__(self) -> None:
        #: what the step says so far
        self.so_far = Overflow()
        self._lock = threading.Lock()

    def note(self, outcome: Outcome) -> None:
        """Takes in what became of a bucket."""
        self.share(outcome.abstained, outcome.void)

    def share(self, own: bool, void: bool) -> None:
        """Takes in what those say, too, who average other parts of the same gradient."""
        with self._lock:
            self.so_far = Overflow(self.so_far.own or own, self.so_far.void or void)

    def take(self) -> Overflow:
        """What the step says, and begins the next one."""
        with self._lock:
            taken, self.so_far = self.so_far, Overflow()
            return taken
