"""What is counted of every op: rows by peer, limits on loss, times. Called once a stage, not per packet."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from tailbound.collective.job import Job
from tailbound.collective.op import Op
from tailbound.collective.tally import gather_flags
from tailbound.errors import TransportError
from tailbound.observe.ledger import Stage
from tailbound.transport.safeguard import Action
from tailbound.wire.schema import Flag, Verdict

#: As plain numbers: arithmetic on an IntFlag costs microseconds.
_SKIP, _STOP, _LOSSY = int(Flag.SKIP), int(Flag.STOP), int(Flag.LOSSY)


def sealed(job: Job, op: Op, summed: NDArray[np.int64]) -> None:
    """Enters the first half of an op that has just been sealed, and sets the flags of the own results.

    Args:
        summed: i64[ranks], contributions of each rank in the own rows.
    """
    own = int(op.place.placement.counts[job.rank])
    expected = taken = 0
    there = int(op.own_present)
    for peer in (p for p in job.membership.here if p not in op.abstainers):
        count = int(summed[peer])
        finished = job.records.contributed(peer, op.label) and peer not in op.stayed_out
        job.accounts.ledger.close(Stage.CONTRIBUTIONS, peer, own, count, finished=finished)
        if count or finished:
            expected += own
            taken += count
        there += count > 0
    found = job.accounts.contributions.judge(expected, taken, there if not op.abstainers else None)
    if found.action >= Action.SKIP:
        op.flags |= _SKIP
    if found.action == Action.STOP:
        op.flags |= _STOP
    if job.accounts.rotation.lossy:
        op.flags |= _LOSSY
    if found.action:
        _say(job, op, found.action, f"of the contributions to rank {job.rank}: {found.why}")


def collected(job: Job, op: Op, by_owner: NDArray[np.int64]) -> None:
    """Enters the second half of an op that has just ended, and obeys what the owners' flags say.

    Args:
        by_owner: i64[ranks], results present of each owner.
    """
    counts = op.place.placement.counts
    expected = taken = 0
    for peer in (p for p in job.membership.here if counts[p]):
        due, count = int(counts[peer]), int(by_owner[peer])
        finished = job.records.published(peer, op.label)
        job.accounts.ledger.close(Stage.RESULTS, peer, due, count, finished=finished)
        if count or finished:
            expected += due
            taken += count
    if op.switched:  # what contributors bring is in the counts of the results
        expected, taken = op.outcome.expected, op.outcome.delivered
    flags = int(gather_flags(job.records.results, op.buffers.source, op.label)) | op.flags
    job.accounts.rotation.observe(
        op.outcome.expected, op.outcome.delivered, rotating=op.rotate, others=bool(flags & _LOSSY)
    )
    found = job.accounts.results.judge(expected, taken)
    if found.action:
        _say(job, op, Action.WARN, f"of the results for rank {job.rank}: {found.why}")
    if not flags & (_SKIP | _STOP):
        return
    # nobody applies this op: every rank that has a row of the owner who said so gets zeros
    assert op.launch is not None
    op.launch.coder.clear(op.launch.out)
    op.outcome.skipped = True
    job.counters["ops_skipped"] += 1
    job.events.emit("skipped", f"op {op.name} is not applied: too much of it was lost", op=op.name)
    if flags & _STOP and op.outcome.error is None:
        op.outcome.error = TransportError(
            f"rank {job.rank}: op {op.name}: more contributions were lost than the safeguard allows "
            "(Limits.stop_op, stop_smoothed); `tailbound top` and stats()['ledger'] say between which ranks"
        )


def in_pieces(job: Job, op: Op) -> None:
    """Says that rows came whose frames the driver hands over in pieces; an error while no row has come in any other."""
    count = job.records.not_linear()
    if count <= job.not_linear_told:
        return
    job.not_linear_told = count
    totals = job.records.verdicts().sum(axis=0)
    taken = int(totals[Verdict.STORED] + totals[Verdict.ADDED] + totals[Verdict.RESULT_TAKEN])
    said = (
        f"{count} frames of this job came in pieces (NOT_LINEAR) and were dropped, {taken} rows were taken: the driver "
        "does not hand over frames of this size in one piece; give all ranks a smaller TAILBOUND_MTU (and attach "
        "again, with a smaller --mtu), or use the udp datapath"
    )
    job.events.emit("not_linear", said, level=logging.ERROR, frames=count, taken=taken)
    if not taken and op.outcome.error is None:
        op.outcome.error = TransportError(f"rank {job.rank}: no row can be taken: {said}")


def delivered(job: Job, op: Op) -> None:
    """Enters an op whose result has been given to its caller."""
    outcome = op.outcome
    job.accounts.latency.add(outcome.nanoseconds)
    job.accounts.flow_bytes = op.flow_bytes
    op.spans.clock = op.start
    if op.launch is not None:
        op.spans.launched, op.spans.admitted = op.launch.launched, op.admitted
    job.trace.add(
        op.label,
        op.place.layout.shape.rows,
        op.spans,
        delivered=outcome.delivered,
        expected=outcome.expected,
        late=outcome.late,
        skipped=outcome.skipped,
        deadline_hits=outcome.deadline_hits,
        missing=len(outcome.missing),
        map=op.place.placement.owner_map.id,
    )


def _say(job: Job, op: Op, action: Action, what: str) -> None:
    job.counters[f"safeguard_{action.name.lower()}"] += 1
    level = logging.WARNING if action < Action.STOP else logging.ERROR
    job.events.emit("loss", f"op {op.name}, {what}", level=level, op=op.name, action=action.name.lower())
