"""Who exchanges what with whom: one flat job, or two dimensions. Pure.

In two dimensions (OptiReduce's transpose, NSDI'25, section 3.2) ranks exchange within groups, then across: ranks at the
same place of their groups are a job. It is made of the engine's own ops: one of the whole bucket in the group, and one
of a shard across. Bytes, flows and incast are those of the design; the order is not, since no op waits between its
halves: the group gathers before the exchange across and not after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tailbound.errors import ConfigError
from tailbound.wire.schema import MAX_RANKS

LAYOUTS = ("flat", "2d")
#: Shards are multiples of so many entries.
_ALIGNED = 16


@dataclass(frozen=True)
class Part:
    """A rank's work in a phase: as ``rank`` of ``job`` it reduces ``entries`` of its bucket from ``begin`` on."""

    job: int
    rank: int
    entries: int
    begin: int = 0


@dataclass(frozen=True)
class Arrangement:
    """A layout.

    Attributes:
        places: for every job, the host of each of its ranks.
        parts: for every rank, its work in each phase.
        name: for a table.
    """

    places: list[list[int]]
    parts: list[list[Part]]
    name: str


def arrange(layout: str, ranks: int, entries: int) -> Arrangement:
    """Return the arrangement of ``ranks`` that reduce a bucket of ``entries`` of float32.

    Groups of ``2d`` have the divisor of ``ranks`` that is nearest to the root.

    Raises:
        ConfigError: that many ranks cannot be arranged so.
    """
    if layout == "flat":
        _check(ranks, "a flat job", "take --layout 2d")
        return Arrangement([list(range(ranks))], [[Part(0, rank, entries)] for rank in range(ranks)], layout)
    if layout != "2d":
        raise ConfigError(f"layout {layout!r} is none of {', '.join(LAYOUTS)}")
    group = next(size for size in range(math.isqrt(ranks), 0, -1) if ranks % size == 0)
    if group < 2:
        raise ConfigError(f"{ranks} ranks are not several groups: give --ranks a number that is not prime")
    groups = ranks // group
    _check(max(group, groups), "a job of a group or across", "give other --ranks")
    within = [list(range(g * group, (g + 1) * group)) for g in range(groups)]
    across = [list(range(k, ranks, group)) for k in range(group)]
    shard = -(-entries // (group * _ALIGNED)) * _ALIGNED
    parts = [
        [
            Part(rank // group, rank % group, entries),
            Part(groups + rank % group, rank // group, shard, rank % group * shard),
        ]
        for rank in range(ranks)
    ]
    return Arrangement(within + across, parts, f"2d {groups}x{group}")


def _check(ranks: int, what: str, advice: str) -> None:
    if not 2 <= ranks <= MAX_RANKS:
        raise ConfigError(f"{what} has 2 to {MAX_RANKS} ranks, not {ranks}: {advice}")
