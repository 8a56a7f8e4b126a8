"""What a rank's log says of its buckets, and how often."""

from __future__ import annotations

import logging
from collections import Counter

from tailbound.collective.op import Outcome

log = logging.getLogger("tailbound")


class Complaints:
    """Warnings of rank ``rank``: every silent rank once, everything else at the 1st, 10th, 100th ... time."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._times: Counter[str] = Counter()
        self._warned: set[int] = set()

    def note(self, outcome: Outcome) -> None:
        """Warns of what became of a bucket."""
        self._warned &= outcome.missing | {self._rank}  # who is back and goes again is named again
        new = outcome.missing - self._warned
        if outcome.abstained and self._rank not in self._warned:
            self._warned.add(self._rank)
            log.warning(
                "rank %d: a gradient has NaN or Inf values; this rank abstains from such ops"
                " (with a loss scale, tailbound.torch.GradScaler lowers it on all ranks)",
                self._rank,
            )
        if new:
            self._warned |= new
            log.warning("rank %d: nothing from rank(s) %s in op %#x", self._rank, sorted(new), outcome.label)
        if outcome.failed_groups:
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
            log.warning("rank %d: %s (%d times so far)", self._rank, what, times)
