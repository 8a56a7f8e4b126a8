"""Which ranks own rows: all but stragglers, suspects and the dead. Pure.

A rank that is late with its gradient holds up only its own rows' share of the work if it owns nothing: after it has
come, its contributions go out while results come in, about one buffer's time instead of 2 (N - 1) / N of it
(StragglAR's gain, for any number of ranks from three on, and several stragglers at once). clock-22.

Every change costs an agreement, so nothing follows a single observation of lateness: a rank goes after several late
steps in a row. It owes a number of steps in time then, and more for every late step, so that a rank which is late and
in time in turn stays out.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping

from tailbound.transport.config import MS

#: A rank is no straggler below this lateness, whatever the pace.
_LEAST = 5 * MS
#: Late steps in a row before a rank loses its rows; steps in time that it owes then, for each late one after that, and
#: at most, before it gets them back.
_GO, _RETURN, _AGAIN, _MOST = 4, 32, 8, 80
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


class Shares:
    """Turns observations, one a step, into the ranks that own rows.

    Args:
        ranks: world size.
        least: so many have to own rows, since rings have no room for a larger share.
    """

    def __init__(self, ranks: int, least: int = 1) -> None:
        self._late = [0] * ranks  # steps in a row
        self._owed = [0] * ranks  # steps in time before a rank owns rows; 0: it does
        self._least = min(least, ranks)
        self.owners: tuple[int, ...] = tuple(range(ranks))

    def update(self, lateness: Mapping[int, int], absent: Collection[int], pace: int) -> tuple[int, ...]:
        """Takes one observation; returns the owners that the next map should have.

        Args:
            lateness: as advertised, ns, by rank.
            absent: ranks that are suspect, dead or gone.
            pace: ns that an op takes as a rule, from launch to result.
        """
        # with two ranks half of a buffer goes out and half in, or a whole one either way: nothing to gain
        limit = late_limit(lateness.values(), pace) if len(self._owed) > 2 else math.inf
        for rank, owed in enumerate(self._owed):
            late = lateness.get(rank, 0)
            self._late[rank] = self._late[rank] + 1 if late > limit else 0
            if rank in absent:
                self._owed[rank] = max(owed, _RETURN)
            elif late > limit and (owed or self._late[rank] >= _GO):
                self._owed[rank] = min(_MOST, max(_RETURN, owed + _AGAIN))
            elif 2 * late <= limit:
                self._owed[rank] = max(0, owed - 1)
        self.owners = self._enough(lateness, absent)
        return self.owners

    def _enough(self, lateness: Mapping[int, int], absent: Collection[int]) -> tuple[int, ...]:
        """Those that are to own rows, and as many more as are needed: half of the ranks that are there.

        Two at least: the rows of a single owner are lost together, and with them all that the others would learn.
        """
        there = len(self._owed) - len(absent)
        fewest = max(self._least, min(max(there, 1), max(2, -(-there // 2))))
        owners = [rank for rank, owed in enumerate(self._owed) if not owed]
        spare = sorted(
            set(range(len(self._owed))).difference(owners),
            key=lambda r: (r in absent, r not in self.owners, lateness.get(r, 0), r),
        )
        return tuple(sorted(owners + spare[: max(0, fewest - len(owners))]))


def late_limit(lateness: Collection[int], pace: int) -> int:
    """Lateness (ns) above which a rank is a straggler, with those of all ranks, where an op takes ``pace`` ns.

    Where one is very late, all wait for it: who comes long before it holds up no rank.
    """
    return max(_LEAST, pace // 4, max(lateness, default=0) // 4)
