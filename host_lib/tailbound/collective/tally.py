"""Counting over slot records and presence, by the library (``host_lib/core/rows.c``): one pass each."""

from __future__ import annotations

import ctypes

from tailbound.collective.known import Known
from tailbound.collective.op import Half, Op
from tailbound.collective.speaker import Speaker
from tailbound.kernel.core import core
from tailbound.wire.schema import Stage, Verdict

#: Verdict on rows that come a second time by a request, by stage.
_TWICE = Verdict.DUPLICATE_REPAIR, Verdict.DUPLICATE_REPAIR_RESULT

#: s64[world], by rank.
Counts = ctypes.Array[ctypes.c_int64]


def summed_by(known: Known, op: Op) -> Counts:
    """Own rows that hold a contribution, by rank."""
    found = (ctypes.c_int64 * known.world)()
    core().fast.tb_summed(known.terms.pointer, ctypes.addressof(op), found)
    return found


def settle(job: Speaker, half: Half, stage: Stage) -> None:
    """Counts, at the end of a half, what repair has brought (clock-23)."""
    if not half.requested:  # as a rule
        return
    for flow in half.begun:
        if flow.again:
            rank, came = flow.rank, int(core().fast.tb_repaired(ctypes.addressof(half), flow.rank))
            job.repairs.came[stage, rank] += came
            job.counters["repair_rows_asked"] += flow.again
            job.counters["rows_repaired"] += came
            twice = job.records.count(rank, _TWICE[stage])
            job.repairs.paths[stage * job.world + rank].settled(flow.again, twice, probed=bool(flow.probed))
