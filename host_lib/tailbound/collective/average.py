"""First half, owner side: when to seal, the mean of what arrived, and publishing it (CLOCKS.md rules 7-9)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tailbound.codec.hashing import seed_of
from tailbound.codec.mean import mean_rows
from tailbound.collective.job import Job, log
from tailbound.collective.op import Op
from tailbound.collective.tally import rows_by_rank
from tailbound.errors import LayoutError
from tailbound.transport.stamp import stamp_results
from tailbound.wire.schema import PacketType, Verdict

#: What to do about ranks that disagree on a bucket.
SAME_MODEL = "All ranks must train the same model with the same bucket sizes and take part in every backward pass"


def average(job: Job, op: Op, now: int) -> int:
    """Seals ``op`` if it is time to, averages and publishes; returns when to look again (0: on arrival)."""
    if op.sealed:
        return 0
    if op.place.placement.counts[job.rank] == 0:
        op.sealed = op.published = True
        return 0
    if op.launch is None and _foreseen_wrongly(job, op):
        return 0
    due, again = _due(job, op, now)
    if due is None:
        return again
    if due == "deadline":
        op.outcome.deadline_hits += 1
        job.counters["seal_deadline_hits"] += 1
    _seal(job, op)
    return 0


def _foreseen_wrongly(job: Job, op: Op) -> bool:
    """Whether the peers' packets have another layout than was foreseen: then nothing can be said before the launch."""
    record = job.record(op.label)
    return record is not None and int(record["layout"]) != op.place.layout.tag


def _due(job: Job, op: Op, now: int) -> tuple[str | None, int]:
    """Why to seal now, if so, and when to look again if not."""
    config = job.config
    record = job.record(op.label)
    own_in = op.encoded or job.self_late
    own_rows = int(op.place.placement.counts[job.rank])
    if record is not None and own_in and int(record["rows_complete"]) >= own_rows and _really(job, op, record):
        return "complete", 0
    if job.ranks == 1 and op.encoded:
        return "complete", 0
    waited = job.waited_for
    finished = own_in and all(_has_finished(job, op, p) for p in waited)
    progress = int(record["progress"]) if record is not None else 0
    if op.own_quiet.passed(now, finished, progress, config.quiet):
        return "quiet", 0
    if op.start:
        op.own_clock.begin(op.start, config.stage_max if op.cold else config.deadline_1, config.stage_max)
        if op.own_clock.expired(now, progress):
            return "deadline", 0
    looks = [t for t in (op.own_quiet.next_look(config.quiet), op.own_clock.next_look(now)) if t]
    return None, min(looks, default=0)


def _really(job: Job, op: Op, record: Any) -> bool:
    """Whether the kernel's count of complete rows can be believed.

    A rank that became live in the middle of an op may have made a row complete for the second time.
    """
    if int(record["opened_ns"]) > job.live_since:
        return True
    own = int(op.place.placement.counts[job.rank])
    summed = np.zeros(job.ranks, np.int64)
    rows_by_rank(job.slots, op.place.sum_seqs[job.rank], own, job.sum_mask, job.cookie, op.label, summed)
    return all(summed[p] >= own for p in job.waited_for)


def _has_finished(job: Job, op: Op, rank: int) -> bool:
    return rank in op.abstainers or job.contributed(rank, op.label)


def _seal(job: Job, op: Op) -> None:
    b, place = op.buffers, op.place
    seq, own = place.sum_seqs[job.rank], int(place.placement.counts[job.rank])
    job.datapath.seal(op.label, seq, own)
    op.sealed = True
    if job.ranks > 1:
        _account(job, op, seq, own)
    if not op.own_present and not op.outcome.abstained and not op.encoded:
        job.self_misses += 1
    else:
        job.self_misses = 0
    means = mean_rows(
        job.store.sums,
        job.store.slots,
        seq,
        job.cookie,
        op.label,
        b.own_groups,
        place.layout.shape.codes,
        b.packets[int(place.placement.starts[job.rank]) :][:own],
        op.own_present,
        b.exponents,
        b.need,
        b.shift,
        b.exponents if op.own_present else b.unknown,
        job.headroom,
        seed_of(job.cookie, op.label),
        job.rank,
        b.results,
        b.scale,
        b.count,
        b.exponent_next,
        b.result_partials,
        b.usable,
        b.need_work,
        job.scratch,
    )
    job.counters["rows_discarded"] += means.mismatched
    job.counters["rows_without_contributor"] += means.missing
    _publish(job, op, own)


def _account(job: Job, op: Op, seq: int, own: int) -> None:
    """Who was in: the ledger of this op, and the suspicion of those of whom nothing came (rule 14)."""
    summed = np.zeros(job.ranks, np.int64)
    rows_by_rank(job.slots, seq, own, job.sum_mask, job.cookie, op.label, summed)
    record = job.record(op.label)
    for rank in range(job.ranks):
        if record is not None and int(record["abstained"][rank >> 6]) >> (rank & 63) & 1:
            op.abstainers.add(rank)
    for peer in job.peers:
        if peer in op.abstainers or peer in job.gone:
            continue
        job.by_sender[peer] += (own, summed[peer])
        op.outcome.expected += own
        op.outcome.delivered += int(summed[peer])
    absent = {p for p in job.peers if summed[p] == 0 and p not in op.abstainers and p not in job.gone}
    op.outcome.missing |= absent
    _name_strangers(job, op, absent)
    suspects = job.contribution_suspicion.observe(absent, op.label)
    for rank in sorted(suspects):
        log.warning(
            "rank %d: rank %d has sent no contribution for %d ops (last: op %#x); no longer waiting for it",
            job.rank, rank, job.config.suspect_after, op.label,
        )  # fmt: skip
    job.publish_live()


def _name_strangers(job: Job, op: Op, absent: set[int]) -> None:
    """A rank of which nothing counts because its layout is another one is not missing but wrong; the op says so."""
    for rank in sorted(absent):
        refused = int(job.verdicts()[rank][Verdict.LAYOUT_MISMATCH])
        if refused and op.launch is not None and op.outcome.error is None:
            op.outcome.error = LayoutError(
                f"rank {job.rank} and rank {rank} disagree on op {op.place.step}.{op.place.index}: {refused} packets "
                f"of rank {rank} had another layout. {SAME_MODEL}"
            )


def _publish(job: Job, op: Op, own: int) -> None:
    """Sends the means to every peer; rows to which nobody contributed are not sent, and counted."""
    b, place = op.buffers, op.place
    usable = b.usable.astype(bool)
    empty = own - int(usable.sum())
    if job.peers:
        head = job.header(PacketType.RESULT, op.label, place.layout.tag, owner=job.rank, rows=own)
        stamp_results(
            b.results,
            0,
            own,
            head.view(np.uint8),
            b.result_partials,
            b.exponent_next,
            b.scale,
            b.count,
            place.result_seq,
            b.own_rows,
            0,
            job.marks.published,
            op.label if job.marks.published == place.previous else job.marks.published,
        )
        rows = b.results if not empty else b.results[usable]
        runs = [(peer, rows) for peer in job.peers if peer not in job.gone]
        until = job.now() + job.config.stage_max
        job.counters["results_sent"] += job.sender.send_runs(runs, until)
    op.published = True
