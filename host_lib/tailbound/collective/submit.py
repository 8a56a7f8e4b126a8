"""Handing packets of an op to the send queue, and the incast control its losses (clock-17 and clock-24)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.collective.announce import announce
from tailbound.collective.job import Job
from tailbound.collective.op import Op, Phase
from tailbound.wire.schema import PacketType, serial_distance


def turn(job: Job, now: int) -> None:
    """Once a turn, before ops are moved on: sends what waits."""
    flow = job.flow
    flow.look(job.membership.live, now)
    if not flow.queue.empty:
        flow.queue.pump(now)


def contributions(job: Job, op: Op, runs: list[tuple[int, NDArray[np.uint8]]]) -> None:
    """Queues the own rows of ``op`` (none: says in its turn that there are none); then its mark rises.

    Who sends rows to a switch tells the others by READY that they have left, since nobody else hears of them.
    """

    def done(packets: int) -> None:
        job.counters["contributions_sent"] += packets
        op.spans.sent, op.stirred = job.now(), True
        if serial_distance(op.label, job.marks.contributed) > 0:
            job.marks.contributed = op.label
        if op.switched and runs:  # what is missing once all have said so was lost
            announce(job, op, job.peers, ask=False)

    until = (op.start or op.admitted) + job.config.stage_max  # no seal is later, so no row is worth more
    published = job.records.published  # an owner that has published an op takes no more rows for it
    over = None if op.switched else lambda rank: published(rank, op.label)
    job.flow.queue.submit(op.label, PacketType.CONTRIBUTION, runs, until, done, job.now(), over)


def results(job: Job, op: Op, runs: list[tuple[int, NDArray[np.uint8]]]) -> None:
    """Queues the results of ``op``, which counts as published once they have left."""

    def done(packets: int) -> None:
        job.counters["results_sent"] += packets
        op.first.phase, op.spans.published, op.stirred = Phase.DONE, job.now(), True

    now, gone = job.now(), job.membership.gone
    # as long as receivers may wait for them past their deadlines, as far as can be told from here
    until = now + job.deadlines.worth_sending(op.flow_bytes) + job.overtime.left(now)
    job.flow.queue.submit(op.label, PacketType.RESULT, runs, until, done, now, lambda rank: rank in gone)


def published_by(job: Job, op: Op) -> int:
    """The mark for the last packet of the results of ``op``, which are queued next: all before them left before."""
    flow, marks = job.flow, job.marks
    if flow.tip is None or serial_distance(marks.published, flow.tip) > 0:
        flow.tip = marks.published
    if flow.tip == op.place.previous:
        flow.tip = op.label
    return flow.tip


def observe(job: Job, op: Op, summed: NDArray[np.int64]) -> None:
    """Feeds the incast control with one sealed op: rows that senders who are through with it lost (clock-24).

    What repair has brought was lost all the same; but in warm-up, where all is repaired until deadlines are known.
    """
    if op.cold:  # ranks that settle on other scales are refused, not lost
        return
    own = int(op.place.placement.counts[job.rank])
    through = [p for p in job.membership.live if p not in op.abstainers and job.records.contributed(p, op.label)]
    asked = op.first.repair.asked if op.first.repair is not None and not job.repairs.warming(op.key) else {}
    lost = sum(max(own - int(summed[p]), len(asked.get(p, ()))) for p in through if summed[p] > 0)
    job.flow.incast.observe(own * len(through), lost)
