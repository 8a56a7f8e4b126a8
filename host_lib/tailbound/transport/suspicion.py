"""Who is no longer waited for: two separate suspicions (clock-8 and clock-14), pure state.

One shared counter lost rows of live but slow ranks in simulation, two separate ones none: a rank whose contributions
come late may well publish in time, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable


class Suspicion:
    """Counts consecutive misses of every rank in one kind of stage."""

    def __init__(self, ranks: int, own: int, after: int) -> None:
        self._misses = [0] * ranks
        self._own = own
        self._after = after
        self._suspects: set[int] = set()
        self._first_missed: dict[int, int] = {}
        self._judged: frozenset[int] = frozenset()

    @property
    def suspects(self) -> frozenset[int]:
        """Ranks suspected now; nobody when it would be more than half of all ranks, self included (clock-14)."""
        return self._judged  # asked for many times an op

    def _judge(self) -> None:
        too_many = 2 * len(self._suspects) > len(self._misses)
        self._judged = frozenset() if too_many else frozenset(self._suspects)

    def first_missed(self, rank: int) -> int:
        """Label of the op that ``rank``, a suspect, was absent from first in the present row of misses."""
        return self._first_missed[rank]

    def observe(self, absent: Iterable[int], op: int = 0) -> set[int]:
        """Takes the ranks absent from one stage of ``op``, in which everybody else was present.

        Returns:
            Ranks that have become suspect by this.
        """
        gone = set(absent)
        new = set()
        for rank in range(len(self._misses)):
            if rank == self._own:
                continue
            if rank not in gone:
                self.clear(rank)
                continue
            if self._misses[rank] == 0:
                self._first_missed[rank] = op
            self._misses[rank] += 1
            if self._misses[rank] >= self._after and rank not in self._suspects:
                self._suspects.add(rank)
                self._judge()
                new.add(rank)
        return new

    def clear(self, rank: int) -> bool:
        """A row of ``rank`` met its deadline; returns whether it had been suspect."""
        self._misses[rank] = 0
        if rank in self._suspects:
            self._suspects.discard(rank)
            self._judge()
            return True
        return False
