"""Which ranks own rows: all but stragglers, suspects and the dead. Pure.

A rank that is late with its gradient holds up only its own rows' share of the work if it owns nothing: after it has
come, its contributions go out while results come in, about one buffer's time instead of 2 (N - 1) / N of it
(StragglAR's gain, for any number of ranks from three on, and several stragglers at once). clock-22.

Every change costs an agreement, so nothing follows a single observation of lateness: going and coming back need several
alike, and coming back needs more of them each time that a rank has to go again.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tailbound.transport.config import MS

#: A rank is no straggler below this lateness, whatever the pace.
_LEAST = 5 * MS
#: Steps alike before a rank that is late loses its rows, and before any rank gets them back; the latter doubles up to a
#: limit.
_GO, _RETURN, _LONGEST_RETURN = 4, 8, 512
#: A rank that goes again within so many steps after its return has returned too early.
_RELAPSE = 128
#: Ops that say how late this rank is as a rule.
_LATENESSES = 16


class Lateness:
    """Own lateness: launch minus the time at which half of the others had come, in nearly all of the last ops.

    The third smallest of the last sixteen counts. A straggler is late in every op; ranks that wait for cores are late
    in turn.

    The others alone are counted: with the own launch among them, two stragglers of four would hide each other. Of an
    even number the upper median counts: of three ranks that wait for cores in turn, two come after the first each time.
    """

    def __init__(self) -> None:
        self._samples: deque[int] = deque(maxlen=_LATENESSES)

    def add(self, launched: int, arrivals: Collection[int]) -> None:
        """Takes the own launch and the first arrivals of live peers in one op, in ns of one clock."""
        if arrivals:
            self._samples.append(launched - statistics.median_high(arrivals))

    @property
    def value(self) -> int:
        """Lateness in nearly all ops, ns, at least 0; 0 until half of a window has been seen."""
        if 2 * len(self._samples) < _LATENESSES:
            return 0
        return max(0, sorted(self._samples)[len(self._samples) // 8])


@dataclass
class _Rank:
    """What the policy has made of one rank; ``alike``: observations running that would have it otherwise."""

    owns: bool = True
    alike: int = 0
    need: int = _RETURN
    since_return: int = _RELAPSE

    def follow(self, wanted: bool, go: int) -> None:
        """Changes once the same has been ``wanted`` often enough running (``go``: to lose the rows)."""
        self.since_return = min(_RELAPSE, self.since_return + 1)
        self.alike = self.alike + 1 if wanted != self.owns else 0
        if self.alike < (self.need if wanted else go):
            return
        self.owns, self.alike = wanted, 0
        if wanted:
            self.since_return = 0
        else:
            self.need = min(_LONGEST_RETURN, 2 * self.need) if self.since_return < _RELAPSE else _RETURN


class Shares:
    """Turns observations, one a step, into the ranks that own rows.

    Args:
        ranks: world size.
        least: so many have to own rows, since rings have no room for a larger share.
    """

    def __init__(self, ranks: int, least: int = 1) -> None:
        self._ranks = [_Rank() for _ in range(ranks)]
        self._least = min(least, ranks)
        self.owners: tuple[int, ...] = tuple(range(ranks))

    def update(self, lateness: Mapping[int, int], absent: Collection[int], pace: int) -> tuple[int, ...]:
        """Takes one observation; returns the owners that the next map should have.

        Args:
            lateness: as advertised, ns, by rank.
            absent: ranks that are suspect, dead or gone.
            pace: ns that an op takes as a rule, from launch to result.
        """
        limit: float = late_limit(lateness.values(), pace)
        if len(self._ranks) == 2:
            limit = math.inf  # half of a buffer out and half in, or a whole one either way: nothing to gain
        for rank, state in enumerate(self._ranks):
            late = lateness.get(rank, 0) * (1 if state.owns else 2) > limit
            state.follow(rank not in absent and not late, 1 if rank in absent else _GO)
        self.owners = self._enough(lateness, absent)
        return self.owners

    def _enough(self, lateness: Mapping[int, int], absent: Collection[int]) -> tuple[int, ...]:
        """Those that are to own rows, and as many more as are needed: half of the ranks that are there.

        Two at least: the rows of a single owner are lost together, and with them all that the others would learn.
        """
        there = len(self._ranks) - len(absent)
        fewest = max(self._least, min(max(there, 1), max(2, -(-there // 2))))
        owners = [rank for rank, state in enumerate(self._ranks) if state.owns]
        spare = sorted(
            set(range(len(self._ranks))).difference(owners),
            key=lambda r: (r in absent, r not in self.owners, lateness.get(r, 0), r),
        )
        return tuple(sorted(owners + spare[: max(0, fewest - len(owners))]))


def late_limit(lateness: Collection[int], pace: int) -> int:
    """Lateness (ns) above which a rank is a straggler, with those of all ranks, where an op takes ``pace`` ns.

    Where one is very late, all wait for it: who comes long before it holds up no rank.
    """
    return max(_LEAST, pace // 4, max(lateness, default=0) // 4)
