"""Who should own how many rows: none for stragglers, suspects and the dead, fewer behind a slow link. Pure.

A rank that is late with its gradient holds up only its own rows' share of the work if it owns nothing: after it has
come, its contributions go out while results come in, about one buffer's time instead of 2 (N - 1) / N of it
(StragglAR's gain, for any number of ranks from three on, and several stragglers at once). clock-22.

Every change costs an agreement, so nothing follows a single observation: going and coming back need several alike, and
coming back needs more of them each time that a rank has to go again.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tailbound.transport.config import MS

#: Weight of an owner without any trouble; slower links get 3, 2 or 1.
FULL = 4
#: A rank is no straggler below this lateness, whatever the pace.
_LEAST = 5 * MS
#: Flows that last less than this say nothing about a link.
_SHORTEST = 2 * MS
#: A flow this fast, relative to the median, is as good as the others.
FAST_ENOUGH = 0.75
#: Steps alike before a rank loses its share for being late, (part of) it for a slow link, and before it gets it back;
#: the latter doubles up to a limit. Hosts that share cores make flows slower than others for many steps running.
_GO, _GO_SLOW, _RETURN, _LONGEST_RETURN = 4, 32, 8, 512
#: A rank that goes again within so many steps after its return has returned too early.
_RELAPSE = 128
#: Ops that say how late this rank is as a rule, and how fast the rows of a peer come in.
_LATENESSES, _FLOWS = 16, 32


class Lateness:
    """Own lateness: launch minus the time at which half of the others had come, in nearly all of the last ops.

    The third smallest of the last sixteen counts. A straggler is late in every op; ranks that wait for cores are late
    in turn.

    The others alone are counted: with the own launch among them, two stragglers of four would hide each other. Of an
    even number the upper median counts: of three ranks that wait for cores in turn, two come after the first each time.
    """

    def __init__(self) -> None:
        self._samples: deque[int] = deque(maxlen=_LATENESSES)

    def observe(self, launched: int, arrivals: Collection[int]) -> None:
        """Takes the own launch and the first arrivals of live peers in one op, in ns of one clock."""
        if arrivals:
            self._samples.append(launched - statistics.median_high(arrivals))

    @property
    def value(self) -> int:
        """Lateness in nearly all ops, ns, at least 0; 0 until half of a window has been seen."""
        if 2 * len(self._samples) < _LATENESSES:
            return 0
        return max(0, sorted(self._samples)[len(self._samples) // 8])


class Speeds:
    """How fast rows of every peer come in, relative to the median of the peers (with two peers, to the faster one).

    Compared are lower quartiles: whatever disturbs a flow for a moment makes it slower, nothing makes it faster.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}

    def observe(self, durations: Mapping[int, int], rows: int) -> None:
        """Takes for each peer how long its ``rows`` rows of one op took to come in (ns)."""
        if len(durations) < 2 or statistics.median_low(durations.values()) < _SHORTEST:
            return
        for rank, took in durations.items():
            self._samples.setdefault(rank, deque(maxlen=_FLOWS)).append(took / rows)

    def values(self) -> dict[int, float]:
        """Relative speed (0..1] of every peer that has been seen in half of a window."""
        quarter = {r: sorted(k)[len(k) // 4] for r, k in self._samples.items() if 2 * len(k) >= _FLOWS}
        if len(quarter) < 2:
            return {}
        typical = statistics.median_low(quarter.values())
        return {rank: min(1.0, typical / took) for rank, took in quarter.items()}


@dataclass(frozen=True)
class Observation:
    """What is known of all ranks at the beginning of a step.

    Attributes:
        lateness: advertised lateness in ns, by rank.
        absent: ranks that are suspect, dead or gone.
        speeds: how fast a rank sends, relative to the others (0..1]; ranks of which nothing is known are left out.
        pace: ns that an op takes as a rule, from launch to result.
    """

    lateness: Mapping[int, int]
    absent: Collection[int] = ()
    speeds: Mapping[int, float] = field(default_factory=dict)
    pace: int = 0


@dataclass
class _Rank:
    """What the policy has made of one rank."""

    level: int = FULL
    candidate: int = FULL
    alike: int = 0
    need: int = _RETURN
    since_return: int = _RELAPSE


class Shares:
    """Turns observations, one a step, into weights.

    Args:
        ranks: world size.
        share_most: largest share of the rows that an owner has room for.
    """

    def __init__(self, ranks: int, share_most: float = 1.0) -> None:
        self._ranks = [_Rank() for _ in range(ranks)]
        self._share_most = share_most
        self.weights: tuple[int, ...] = (1,) * ranks

    def observe(self, seen: Observation) -> tuple[int, ...]:
        """Takes one observation; returns the weights that the next map should have, by rank."""
        slow = levels(seen.speeds, len(self._ranks))
        limit: float = late_limit(seen.lateness.values(), seen.pace)
        if len(self._ranks) == 2:
            limit = math.inf  # half of a buffer out and half in, or a whole one either way: nothing to gain
        for rank, state in enumerate(self._ranks):
            lateness = seen.lateness.get(rank, 0)
            if rank in seen.absent:
                wanted = 0
            elif state.level:
                wanted = 0 if lateness > limit else slow.get(rank, state.level)
            else:
                wanted = 0 if 2 * lateness > limit else slow.get(rank, FULL)
            late = lateness > limit
            self._follow(state, wanted, 1 if rank in seen.absent else _GO if late else _GO_SLOW)
        self.weights = self._bounded(seen)
        return self.weights

    def _follow(self, state: _Rank, wanted: int, go: int) -> None:
        """Changes a rank's level once the same other one has been wanted often enough running (``go``: a lower one)."""
        state.since_return = min(_RELAPSE, state.since_return + 1)
        if wanted == state.level:
            state.candidate = wanted
            return
        state.alike = state.alike + 1 if state.candidate == wanted else 1
        state.candidate = wanted
        if wanted < state.level and state.alike >= go:
            relapsed = state.since_return < _RELAPSE
            state.need = min(_LONGEST_RETURN, 2 * state.need) if relapsed else _RETURN
            state.level = wanted
        elif wanted > state.level and state.alike >= state.need:
            state.level, state.since_return = wanted, 0

    def _bounded(self, seen: Observation) -> tuple[int, ...]:
        """The levels as weights; half of the ranks that are there own rows, and none more than it has room for.

        Two at least: the rows of a single owner are lost together, and with them all that the others would learn.
        """
        weights = [state.level for state in self._ranks]
        there = len(weights) - len(seen.absent)
        fewest = min(max(there, 1), max(2, -(-there // 2)))
        spare = sorted(
            (r for r, w in enumerate(weights) if not w),
            key=lambda r: (r in seen.absent, not self.weights[r], seen.lateness.get(r, 0), r),
        )
        for rank in spare:
            owners = sum(w > 0 for w in weights)
            if owners >= fewest and max(weights) <= self._share_most * sum(weights):
                break
            weights[rank] = max(weights) or FULL
        if max(weights) > self._share_most * sum(weights):
            weights = [min(1, w) for w in weights]
        same = {w for w in weights if w}
        return tuple(min(1, w) for w in weights) if len(same) == 1 else tuple(weights)


def late_limit(lateness: Collection[int], pace: int) -> int:
    """Lateness (ns) above which a rank is a straggler, with those of all ranks and ``pace`` as in ``Observation``.

    Where one is very late, all wait for it: who comes long before it holds up nobody.
    """
    return max(_LEAST, pace // 4, max(lateness, default=0) // 4)


def levels(speeds: Mapping[int, float], ranks: int) -> dict[int, int]:
    """Weights 0..``FULL`` of ranks whose speeds are known, so that all are through at the same time.

    A rank with the share s sends its contributions to the rest, 1 - s of a buffer, and its results to N - 1 others:
    1 + (N - 2) s in all. With speed v this takes as long as everywhere if s = (c v - 1) / (N - 2), for the c with which
    the shares add up to 1. With two ranks it is 1, whatever the shares: nothing to gain.
    """
    if ranks <= 2 or min(speeds.values(), default=1.0) >= FAST_ENOUGH:
        return dict.fromkeys(speeds, FULL)
    known = {rank: 1.0 if v >= FAST_ENOUGH else max(v, 0.01) for rank, v in speeds.items()}
    every = [*known.values(), *[1.0] * (ranks - len(known))]
    low, high = 1.0, 1.0 + ranks * ranks / min(every)
    for _ in range(60):
        c = (low + high) / 2
        total = sum(max(0.0, (c * v - 1) / (ranks - 2)) for v in every)
        low, high = (c, high) if total < 1 else (low, c)
    best = max(every) * high - 1
    return {rank: round(FULL * max(0.0, (v * high - 1) / best)) for rank, v in known.items()}
