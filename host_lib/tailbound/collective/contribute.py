"""First half, sending side: agree on scales, encode, send contributions (codec-4 to codec-8, clock-17)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.encode import Encoded
from tailbound.codec.feedback import write_residual
from tailbound.codec.hashing import seed_of
from tailbound.codec.scale import cold_exponents, headroom_of
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import Shape
from tailbound.collective import switched, traffic
from tailbound.collective.announce import announce
from tailbound.collective.job import Job
from tailbound.collective.op import Op
from tailbound.collective.tally import write_expect
from tailbound.collective.timing import deadline_1
from tailbound.transport.clock import stage_start
from tailbound.transport.config import MS
from tailbound.transport.stamp import stamp_contributions
from tailbound.wire.schema import EXPONENT_NONE, Flag, PacketType, op_slot

#: How long a cold op waits before it tells its needs again to ranks that have not heard them.
_AGREE_PAUSE = 2 * MS


def start_clock(job: Job, op: Op) -> None:
    """Looks whether a majority has shown up (clock-3), and notes when; once started, a clock stands."""
    if op.start:
        return
    record = job.record(op.label)
    need = int(job.store.control["need"][0])
    op.start = stage_start(
        heard_fewer=int(record["majority_ns"][0]) if record is not None else 0,
        heard_need=int(record["majority_ns"][1]) if record is not None else 0,
        alone=need <= 1,
        launched=op.admitted if op.launch else 0,
        start_max=job.deadlines.start_max,
    )
    if op.start > job.now():
        op.start = 0


def contribute(job: Job, op: Op, now: int) -> int:
    """Moves the sending side of ``op`` on as far as it goes.

    Returns:
        When to look again (0: when something arrives).
    """
    if op.launch is None or op.encoded:
        return 0
    if op.launch.prepare is not None:
        op.launch.prepare()
        op.launch.prepare = None
    if op.silent:
        _done_sending(job, op)
        announce(job, op, job.peers, ask=False)
        return 0
    if op.overtaken or (op.sealed and _too_late(job, op, now)):
        if not (op.switched and switched.worth_asking(job, op)):
            _stay_out(job, op)
            return 0
        op.outcome.late = True
        job.counters["late_launches"] += 1
    if not op.needs_own:
        op.cold = op.key not in job.exponents
    if op.cold:
        again = _agree(job, op, now)
        if again >= 0:
            return again
    else:
        known = job.exponents.get(op.key)
        op.buffers.exponents[:] = EXPONENT_NONE if known is None else known
    _encode(job, op)
    return 0


def _too_late(job: Job, op: Op, now: int) -> bool:
    """Whether the first half is over for everybody, and not only for the own rows, which may not be waited for."""
    return op.start > 0 and now > op.start + deadline_1(job, op)


def _stay_out(job: Job, op: Op) -> None:
    """The own rows have been sealed without us: one packet says so instead of rows that nobody takes (clock-17)."""
    op.outcome.late = op.outcome.unsent = True
    job.counters["late_launches"] += 1
    _done_sending(job, op)
    announce(job, op, job.peers, ask=False)


def _agree(job: Job, op: Op, now: int) -> int:
    """Cold op: hears everybody's needs; returns when to look again, or -1 when the exponents are settled."""
    assert op.launch is not None
    if not op.needs_own:
        seed = seed_of(job.cookie, op.label)
        shape = op.place.layout.shape
        finite = _measure(job, op, seed, shape)
        op.needs_own, op.cold_since = True, now
        if not finite:
            op.buffers.need[:] = EXPONENT_NONE
        op.needs[job.rank] = op.buffers.need.copy()
        announce(job, op, job.peers, ask=False)
        op.ready_again = now + _AGREE_PAUSE
    missing = [p for p in job.waited_for if p not in op.needs and p not in op.abstainers]
    # half of the stage, so that what is agreed on can still be sent before the seal
    limit = (op.start or op.admitted + job.deadlines.start_max) + job.config.stage_max // 2
    settled = [p for p in missing if job.contributed(p, op.label)]
    if len(settled) == len(missing):  # for them this op is not cold, or they have settled without us
        limit = min(limit, op.cold_since + job.deadlines.advertised)
    if missing and now < limit:
        if now >= op.ready_again:
            op.ready_again = now + _AGREE_PAUSE
            announce(job, op, [p for p in job.peers if p not in op.heard_by], ask=False)
        return min(op.ready_again, limit)
    op.ready_again = 0
    headroom = headroom_of(job.ranks, op.place.layout.shape.bits)
    op.buffers.exponents[:] = cold_exponents(np.stack(list(op.needs.values())), headroom)
    if missing:
        job.counters["cold_incomplete"] += 1
    if settled:
        op.buffers.exponents[:] = EXPONENT_NONE  # whatever we chose would not be theirs
    return -1


def _measure(job: Job, op: Op, seed: int, shape: Shape) -> bool:
    assert op.launch is not None
    coder, data, need, rotate = op.launch.coder, op.launch.data, op.buffers.need, op.rotate
    return all(
        job.lanes.each(
            shape.groups,
            lambda scratch, groups: coder.measure(data, shape, seed, scratch, need, rotate=rotate, groups=groups),
            divide=coder.divisible,
        )
    )


def _encode(job: Job, op: Op) -> None:
    assert op.launch is not None
    op.spans.encoding = job.now()
    b, place = op.buffers, op.place
    shape = place.layout.shape
    coder, data, seed = op.launch.coder, op.launch.data, seed_of(job.cookie, op.label)
    cap, rotate = job.shift_cap, op.rotate

    def part(scratch: Scratch, groups: tuple[int, int]) -> Encoded:
        return coder.encode(
            data,
            shape,
            seed,
            job.rank,
            0 if op.switched else cap,
            b.exponents,
            b.packets,
            b.position,
            b.partials,
            scratch,
            b.need,
            b.shift,
            b.skipped,
            rotate=rotate,
            groups=groups,
        )

    parts = job.lanes.each(shape.groups, part, divide=coder.divisible)
    if not all(part.finite for part in parts):
        op.outcome.abstained = True
        job.counters["abstained"] += 1
        _done_sending(job, op)
        announce(job, op, job.peers, ask=False)
        return
    op.outcome.clipped = sum(part.clipped for part in parts)
    op.outcome.skipped_groups = int(b.skipped.sum())
    op.own_present = not (op.outcome.late if op.switched else op.sealed)
    op.own_in = job.now()
    job.self_misses = 0
    _expect(job, op)
    np.take(b.exponents, b.group, out=b.packet_exponent)
    np.take(b.need, b.group, out=b.packet_need)
    np.take(b.shift, b.group, out=b.packet_shift)
    if op.switched:
        switched.send(job, op)
    else:
        _send(job, op)
    if op.launch.residual is not None:
        _keep_residual(job, op, op.launch.residual, seed)


def _keep_residual(job: Job, op: Op, residual: NDArray[np.float32], seed: int) -> None:
    """What the own codes leave unsaid, once they are on their way; ``check_codes`` lets only the host's come here."""
    assert op.launch is not None
    b, data, rotate = op.buffers, op.launch.data, op.rotate
    shape = op.place.layout.shape

    def part(scratch: Scratch, groups: tuple[int, int]) -> None:
        write_residual(
            data, b.packets, b.position, b.exponents, b.shift, b.skipped, shape, seed, scratch, b.source, b.row_scale,
            residual, rotate=rotate, groups=groups,
        )  # fmt: skip

    job.lanes.each(shape.groups, part)


def _expect(job: Job, op: Op) -> None:
    """Tells the kernel which exponents are right for the own slots (codec-9)."""
    store, place = job.store, op.place
    own = int(place.placement.counts[job.rank])
    write_expect(
        store.expect.view(np.uint64),
        place.sum_seqs[job.rank],
        job.sum_mask,
        op.label,
        op.buffers.own_groups,
        op.buffers.exponents,
    )
    slot = op_slot(op.label)
    store.expect_results[slot]["rows"] = place.layout.shape.rows - own
    store.expect_results[slot]["op"] = op.label


def _send(job: Job, op: Op) -> None:
    """Stamps and sends the rows of every peer, bursts in turn, beginning with rank + 1."""
    b, place = op.buffers, op.place
    placement, label = place.placement, op.label
    runs = []
    keep = None
    form = Flag.NIBBLES if place.layout.shape.bits == 4 else Flag(0)
    if b.skipped.any():
        keep = b.skipped[b.group] == 0
    for peer in job.peers:
        first, count = int(placement.starts[peer]), int(placement.counts[peer])
        if count == 0 or peer in job.gone:
            continue
        head = job.header(PacketType.CONTRIBUTION, label, place.layout.tag, owner=peer, rows=count, flags=form)
        head["map_id"] = placement.owner_map.id
        stamp_contributions(
            b.packets,
            first,
            count,
            head.view(np.uint8),
            b.partials,
            b.packet_exponent,
            b.packet_need,
            b.packet_shift,
            place.sum_seqs[peer],
            b.first[peer],
            job.marks.contributed,
            label,
        )
        rows = b.packets[first : first + count]
        runs.append((peer, rows if keep is None else rows[keep[first : first + count]]))
    op.encoded = True
    traffic.contributions(job, op, runs)
    rowless = [p for p in job.peers if placement.counts[p] == 0 and p not in job.gone]
    if rowless:  # every rank hears of every op (clock-2)
        announce(job, op, rowless, ask=False)


def _done_sending(job: Job, op: Op) -> None:
    """Nothing of this rank's own comes in this op."""
    op.encoded = True
    traffic.contributions(job, op, [])
