"""Repair: answers ranks that ask for rows again, and counts what the own questions have brought (clock-23)."""

from __future__ import annotations

import ctypes

from tailbound.collective.job import Job
from tailbound.collective.op import Half
from tailbound.kernel.core import core
from tailbound.wire.schema import Stage, Verdict

#: Verdict on rows that come a second time by a request, by stage.
_TWICE = Verdict.DUPLICATE_REPAIR, Verdict.DUPLICATE_REPAIR_RESULT


def settle(job: Job, half: Half, stage: Stage) -> None:
    """Counts, at the end of a half, what repair has brought."""
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
