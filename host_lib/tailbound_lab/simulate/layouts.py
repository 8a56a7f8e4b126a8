"""Who exchanges what with whom: flat, in two dimensions, or between hosts of several ranks. Pure.

- ``flat``: one job of all ranks.
- ``2d``: OptiReduce's two-dimensional transpose (NSDI'25, section 3.2): within groups, then across. Ranks at the same
  place of their groups are a job. It is made of the engine's own ops: one of the whole bucket in the group, whose
  halves are the reduce-scatter and the all-gather of the design, and one of a shard across. Bytes, flows and incast
  are those of the design; the order is not, since no op waits between its halves: the group gathers before the
  exchange across and not after it.
- ``hosts``: the ranks of a host reduce and gather among themselves, which takes time and no network, and rank k of a
  host exchanges shard k with ranks k of other hosts (``docs/torch/nodes.md``). They share the link of their host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tailbound.errors import ConfigError
from tailbound.wire.schema import MAX_RANKS

LAYOUTS = ("flat", "2d", "hosts")
#: Shards are multiples of so many entries.
_ALIGNED = 16


@dataclass(frozen=True)
class Part:
    """What a rank does in a phase: as ``rank`` of ``job`` it reduces ``entries`` of its bucket from ``begin`` on."""

    job: int
    rank: int
    entries: int
    begin: int = 0


@dataclass(frozen=True)
class Arrangement:
    """A layout.

    Attributes:
        places: for every job, the host of each of its ranks.
        parts: for every rank, what it does in each phase.
        name: for a table.
        peers: how many others a rank sends to.
        local: entries that a rank reduces and gathers within its host; 0: there is nothing to.
    """

    places: list[list[int]]
    parts: list[list[Part]]
    name: str
    peers: int
    local: int = 0


def arrange(layout: str, ranks: int, entries: int, *, group: int = 0, per_host: int = 8) -> Arrangement:
    """The arrangement of ``ranks`` that reduce ``entries`` of float32.

    Args:
        layout: of ``LAYOUTS``.
        ranks: how many.
        entries: of a bucket.
        group: ranks of a group (``2d``); 0: the divisor that is nearest to the root.
        per_host: ranks of a host (``hosts``).

    Raises:
        ConfigError: that many ranks cannot be arranged so.
    """
    if layout == "flat":
        _check(ranks, "a flat job", "take --layout 2d or hosts")
        parts = [[Part(0, rank, entries)] for rank in range(ranks)]
        return Arrangement([list(range(ranks))], parts, "flat", ranks - 1)
    if layout == "2d":
        group = group or _root(ranks)
        if ranks % group or group < 2 or ranks // group < 2:
            raise ConfigError(f"{ranks} ranks are not several groups of {group}: give --group a divisor of --ranks")
        groups = ranks // group
        _check(max(group, groups), "a job of a group or across", "give another --group")
        within = [list(range(g * group, (g + 1) * group)) for g in range(groups)]
        across = [list(range(k, ranks, group)) for k in range(group)]
        shard = _shard(entries, group)
        parts = [
            [
                Part(rank // group, rank % group, entries),
                Part(groups + rank % group, rank // group, shard, rank % group * shard),
            ]
            for rank in range(ranks)
        ]
        return Arrangement(within + across, parts, f"2d {groups}x{group}", group + groups - 2)
    if layout != "hosts":
        raise ConfigError(f"layout {layout!r} is none of {', '.join(LAYOUTS)}")
    if ranks % per_host or ranks // per_host < 2:
        raise ConfigError(f"{ranks} ranks are not several hosts of {per_host}: give --ranks a multiple of --per-host")
    hosts = ranks // per_host
    _check(hosts, "a job of one rank a host", "take more ranks a host")
    shard = _shard(entries, per_host)
    parts = [[Part(rank % per_host, rank // per_host, shard, rank % per_host * shard)] for rank in range(ranks)]
    return Arrangement([list(range(hosts))] * per_host, parts, f"{hosts}x{per_host} hosts", hosts - 1, entries)


def _check(ranks: int, what: str, advice: str) -> None:
    if not 2 <= ranks <= MAX_RANKS:
        raise ConfigError(f"{what} has 2 to {MAX_RANKS} ranks, not {ranks}: {advice}")


def _root(ranks: int) -> int:
    """The largest divisor up to the square root."""
    return next(size for size in range(math.isqrt(ranks), 0, -1) if ranks % size == 0)


def _shard(entries: int, shards: int) -> int:
    return -(-entries // (shards * _ALIGNED)) * _ALIGNED
