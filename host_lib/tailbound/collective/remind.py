"""Asking for marks whose packets were lost, instead of waiting for a deadline (clock-7b, clock-12, clock-30)."""

from __future__ import annotations

import numpy as np

from tailbound.collective.announce import announce
from tailbound.collective.job import Job
from tailbound.collective.mend import gather
from tailbound.collective.op import Op
from tailbound.transport.silence import SHORT
from tailbound.wire.schema import PacketType


def remind(job: Job, op: Op, now: int) -> int:
    """Asks for marks while ``op`` is waiting and nothing comes any more; returns when to look again."""
    record = job.record(op.label)
    progress = int(record["progress"]) + int(record["results_in"]) if record is not None else 0
    due = (op.result_clock if op.published else op.own_clock).due
    asked = op.silence.turn(now, progress, due, lambda: _missing(job, op))
    for peer in asked:
        job.overtime.asked(peer, now, job.heard([peer]))
    if asked and op.published:
        # READY would not do: to an owner that is through with the op it is a stale row, and the kernel drops it
        head = job.header(PacketType.REPAIR, op.label, op.place.layout.tag)
        for peer in asked:
            job.tell(peer, head)
            job.counters["asked"] += 1
    elif asked:
        announce(job, op, asked, ask=True)
    return op.silence.again


def _missing(job: Job, op: Op) -> tuple[list[int], list[int]]:
    """Peers whose mark of the present half is missing: those of which rows have come, and the others."""
    peers = [p for p in job.peers if p not in job.gone]
    if op.switched:  # rows go to the switch, so that nothing of a peer says whether it has begun
        return [p for p in peers if not job.contributed(p, op.label)], []
    if op.abstains:  # others may have nothing to send either, and the words that say so may all be lost
        return [p for p in peers if _unfinished(job, op, p)], []
    counts = op.place.placement.counts
    rows = np.zeros(job.ranks, np.int64)
    if op.published:
        missing = [p for p in peers if counts[p] and not job.published(p, op.label)]
        if missing:
            gather(job, op, rows)
        flow = counts
    else:
        missing = [p for p in peers if p not in op.abstainers and not job.contributed(p, op.label)]
        record = job.record(op.label)
        if record is not None:
            for p in missing:
                rows[p] = int(record["begun"][p >> 6]) >> (p & 63) & 1
        flow = np.full(job.ranks, counts[job.rank])
    begun = [p for p in missing if rows[p] or flow[p] <= SHORT]
    return begun, [p for p in missing if p not in begun]


def _unfinished(job: Job, op: Op, peer: int) -> bool:
    if op.published:
        return not job.published(peer, op.label)
    contributed = peer in op.abstainers or job.contributed(peer, op.label)
    return not (contributed and job.published(peer, op.label))
