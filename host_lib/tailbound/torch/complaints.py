"""What a rank's log says of its buckets, and how often."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from tailbound.collective.op import Outcome
from tailbound.observe.events import Thinned
from tailbound.transport.steps import label_text


class Complaints:
    """Warnings of rank ``rank``: of silent ranks as they fall silent, of everything else at the 1st, 10th, 100th ...
    time; of no kind more often than ``Thinned`` lets pass.
    """

    def __init__(self, rank: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._rank = rank
        self._log = Thinned(rank, clock)
        self._times: Counter[str] = Counter()
        self._warned: set[int] = set()

    def note(self, outcome: Outcome) -> None:
        """Warns of what became of a bucket."""
        self._warned &= outcome.missing | {self._rank}  # who is back and goes again is named again
        new = outcome.missing - self._warned
        if outcome.abstained and self._rank not in self._warned:
            self._warned.add(self._rank)
            self.say(
                "abstained",
                "a gradient has NaN or Inf values; this rank abstains from such ops"
                " (with a loss scale, tailbound.torch.GradScaler lowers it on all ranks)",
            )
        if new:
            self._warned |= new
            self.say("missing", f"nothing from rank(s) {sorted(new)} in op {label_text(outcome.label)}")
        if outcome.void:
            self.complain("a gradient is zero, since all ranks abstained: each had NaN or Inf values")
        elif outcome.failed_groups:
            self.complain("parts of a gradient are zero, since no rank's rows of them came in time")
        if outcome.overwritten:
            self.complain("results were overwritten before use: give a larger ring_mib")
        if outcome.late and not outcome.abstained:
            self.complain("this rank was too late with its gradient; the average is that of the others")

    def complain(self, what: str) -> None:
        """Warns at the 1st, 10th, 100th ... time."""
        self._times[what] += 1
        times = self._times[what]
        if times in (1, 10, 100) or times % 1000 == 0:
            self.say(what, f"{what} ({times} times so far)")

    def say(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        """Logs ``text`` unless there were enough lines of ``kind`` lately."""
        self._log.say(level, kind, text)
