"""First half, owner side: the mean of what arrived, and publishing it (clock-9)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.hashing import seed_of
from tailbound.codec.mean import mean_rows
from tailbound.codec.scale import headroom_of
from tailbound.collective import accounting, fanout, submit
from tailbound.collective.actions import Seal
from tailbound.collective.job import Job
from tailbound.collective.op import Op, Phase
from tailbound.collective.retransmit import settle_contributions
from tailbound.collective.view import View
from tailbound.errors import LayoutError
from tailbound.transport.headers import Fields, finalise
from tailbound.transport.stage import cut
from tailbound.wire.schema import Flag, PacketType, Verdict

#: What to do about ranks that disagree on a bucket.
SAME_MODEL = (
    "All ranks must train the same model with the same bucket sizes, bits and use of a loss scale, and take part in "
    "every backward pass"
)


def seal(job: Job, op: Op, action: Seal) -> None:
    """Closes the first half of ``op``: averages what came, and publishes it."""
    job.overtime.charge(op.first.clock, job.now())
    op.first.why = action.why
    b, place = op.buffers, op.place
    seq, own = place.sum_seqs[job.rank], int(place.placement.counts[job.rank])
    job.datapath.seal(op.label, seq, own)
    op.first.phase = Phase.CLOSED
    op.spans.sealed = job.now()
    if job.ranks > 1:
        view = View(job, op)
        summed = _account(view)
        if action.why == "deadline":
            _cut(view, summed)
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
        headroom_of(job.ranks, place.layout.shape.bits),
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
        bits=place.layout.shape.bits,
    )
    job.counters["rows_discarded"] += means.mismatched
    job.counters["rows_without_contributor"] += means.missing
    _publish(job, op, own)


def _cut(view: View, summed: NDArray[np.int64]) -> None:
    """Counts a seal at the deadline, and keeps what it cut off for the next ones."""
    job, op = view.job, view.op
    op.outcome.deadline_hits += 1
    job.counters["seal_deadline_hits"] += 1
    flows = [(int(summed[p]), view.own) for p in job.waited_for if not view.brings_no_more(p)]
    op.first.cut, op.first.lost = cut(op.spans.sealed - op.start, flows)


def _account(view: View) -> NDArray[np.int64]:
    """Who was in: the ledger of this op, and the suspicion of those of whom nothing came (clock-14).

    Returns:
        Rows that came, by rank.
    """
    job, op, own, record = view.job, view.op, view.own, view.record
    settle_contributions(view)
    summed = view.summed()
    for rank in range(job.ranks):
        if record is not None and int(record["abstained"][rank >> 6]) >> (rank & 63) & 1:
            op.abstainers.add(rank)
    for peer in job.peers:
        if peer in op.abstainers or peer in job.gone:
            continue
        op.outcome.expected += own
        op.outcome.delivered += int(summed[peer])
    accounting.sealed(job, op, summed)
    absent = {p for p in job.peers if summed[p] == 0 and p not in op.abstainers and p not in job.gone}
    op.outcome.missing |= absent
    _name_strangers(job, op, absent)
    suspects = job.membership.observe_contributions(
        absent, op.label, in_step=job.steps.in_step and not op.overtaken, step=op.place.step
    )
    for rank in sorted(suspects):
        job.emit(
            "suspect",
            f"rank {rank} has sent no contribution for {job.config.suspect_after} ops (last: op {op.name}); "
            "no longer waiting for it",
            suspect=rank, stage="contributions", op=op.name,
        )  # fmt: skip
    submit.observe(job, op, summed)
    job.publish_live()
    return summed


def _name_strangers(job: Job, op: Op, absent: set[int]) -> None:
    """A rank of which nothing counts because its layout is another one is not missing but wrong; the op says so."""
    for rank in sorted(absent):
        refused = int(job.verdicts()[rank][Verdict.LAYOUT_MISMATCH])
        if refused and op.launch is not None and op.outcome.error is None:
            op.outcome.error = LayoutError(
                f"rank {job.rank} and rank {rank} disagree on op {op.name}: {refused} packets "
                f"of rank {rank} had another layout. {SAME_MODEL}"
            )


def _publish(job: Job, op: Op, own: int) -> None:
    """Sends the means to every peer; rows to which nobody contributed are not sent, and counted."""
    b, place = op.buffers, op.place
    usable = b.usable.astype(bool)
    empty = own - int(usable.sum())
    if job.peers:
        flags = op.flags
        if op.abstains:
            flags |= Flag.ABSTAIN  # who missed the word hears it with the mark that says that nothing more will come
        head = job.header(PacketType.RESULT, op.label, place.layout.tag, owner=job.rank, rows=own, flags=flags)
        head["map_id"] = place.placement.owner_map.id
        fields = Fields(b.exponent_next, scale=b.scale, counted=b.count)
        mark = submit.published_by(job, op)
        finalise(b.results, head, b.result_partials, fields, place.result_seq, b.own_rows, mark)
        rows = b.results if not empty else b.results[usable]
        submit.results(job, op, fanout.runs(job, rows))
    else:
        op.first.phase = Phase.DONE
        op.spans.published = job.now()
