"""Repair in the transport thread: looks for missing rows, asks for them, and answers others (clock-23).

Results and contributions are repaired in every op. A missing contribution costs its row one contributor, which the mean
allows for, and a missing result costs every replica; but both are asked for while others are still sending, as a rule,
so that a row that was lost costs no op its time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.hashing import seed_of
from tailbound.collective.job import Job
from tailbound.collective.messages import decode_repair, encode_repair
from tailbound.collective.op import Op
from tailbound.collective.repair import REPEATS, REPEATS_COLD, Halves, Places, Request, Round, asked_most, patience
from tailbound.collective.tally import gather_results, rows_by_rank
from tailbound.collective.timing import flow_bytes
from tailbound.transport.burst import burst_packets
from tailbound.transport.stamp import restamp
from tailbound.wire.schema import Flag, PacketType, serial_distance

_CONTRIBUTIONS, _RESULTS = 0, 1
_NONE = np.zeros(0, np.int64)


# -- asking -------------------------------------------------------------------------------------------------------


def ask_results(job: Job, op: Op, now: int, *, late: bool = False) -> tuple[bool, int]:
    """Asks owners that have finished for what is missing of their results; a ``late`` launch asks at once.

    Returns:
        Whether repair is still open, and when to look again (0: on arrival).
    """
    counts, label = op.place.placement.counts, op.label
    if not _worth_it(job, op):
        return False, 0
    # who has said goodbye answers for a while (clock-15)
    finished = [p for p in [*job.waited_owners, *job.gone] if counts[p] and job.published(p, label)]
    halves = _halves(op)
    if halves.second is None:
        if not finished:
            return False, 0
        halves.second = _round(job, op, op.place.layout.shape.rows)
    gathered = False

    def missing(owner: int) -> Places:
        nonlocal gathered
        if not gathered:
            gather(job, op, np.zeros(job.ranks, np.int64))
            gathered = True
        return np.flatnonzero(op.buffers.source[op.place.placement.rows_of(owner)] == -1)

    pause = 0 if late else job.deadlines.quiet
    for owner, places in halves.second.turn(now, finished, missing, lambda p: int(counts[p]), pause):
        _ask(job, op, owner, places, int(counts[owner]), Flag(0))
    return halves.second.open, halves.second.look


def owed(job: Job, op: Op) -> bool:
    """Whether a rank that has said goodbye, and is not waited for, may still answer for its results (clock-15)."""
    if not job.gone or not _worth_it(job, op):
        return False
    counts, second = op.place.placement.counts, op.repair.second if op.repair is not None else None
    finished = [p for p in job.gone if counts[p] and job.published(p, op.label)]
    return any(second is None or not second.over(p) for p in finished)


def ask_contributions(job: Job, op: Op, now: int) -> tuple[bool, int]:
    """Asks ranks that have finished for contributions to the own rows; as ``ask_results``."""
    if not job.config.repair or op.overtaken:
        return False, 0
    own = int(op.place.placement.counts[job.rank])
    out = op.abstainers | op.stayed_out
    finished = [p for p in job.waited_for if p not in out and job.contributed(p, op.label)]
    halves = _halves(op)
    if halves.first is None:
        if not finished:
            return False, 0
        halves.first = _round(job, op, own * len(job.peers))
    summed: NDArray[np.int64] | None = None

    def missing(rank: int) -> Places:
        nonlocal summed
        if summed is None:
            summed = np.zeros(job.ranks, np.int64)
            rows_by_rank(job.slots, op.place.sum_seqs[job.rank], own, job.sum_mask, job.cookie, op.label, summed)
        return _NONE if summed[rank] >= own else _unsummed(job, op, rank)

    requests = halves.first.turn(now, finished, missing, lambda p: own, job.deadlines.quiet)
    for rank, places in requests:
        _ask(job, op, rank, places, own, Flag.FIRST_HALF)
    return halves.first.open, halves.first.look


def last_call(job: Job, op: Op, now: int) -> int:
    """For a late launch: its time was up before it began, but it may use one round of repair (clock-13).

    Returns:
        Until when to wait for the answers; 0: no longer.
    """
    second = op.repair.second if op.repair is not None else None
    if second is None or not second.open:
        return 0
    return second.last_call if now < second.last_call else 0


def settle_contributions(job: Job, op: Op) -> None:
    """Counts, at the seal, what repair has brought."""
    first = op.repair.first if op.repair is not None else None
    if first is not None:
        for rank, places in first.asked.items():
            lost = np.intersect1d(places, _unsummed(job, op, rank), assume_unique=True)
            _count(job, _CONTRIBUTIONS, rank, len(places), len(places) - len(lost))


def settle_results(job: Job, op: Op) -> None:
    """Counts, when the results have been gathered for the last time, what repair has brought."""
    job.repairs.finished(op.key)
    second = op.repair.second if op.repair is not None else None
    if second is not None:
        for owner, places in second.asked.items():
            here = op.buffers.source[op.place.placement.rows_of(owner)[places]] != -1
            _count(job, _RESULTS, owner, len(places), int(here.sum()))
            if here.all():
                second.came(owner, op.spans.decoding)


def gather(job: Job, op: Op, by_owner: NDArray[np.int64]) -> int:
    """Notes in ``op.buffers.source`` which results are here; returns how many, ``by_owner`` i64[ranks] of whom."""
    return int(
        gather_results(
            job.presence,
            op.place.result_seq,
            job.result_mask,
            job.cookie,
            op.label,
            op.place.placement.owner,
            job.rank,
            op.buffers.source,
            by_owner,
        )
    )


def _worth_it(job: Job, op: Op) -> bool:
    """Whether results are repaired: not those of an op that left no trace here, since the others are far ahead."""
    return job.config.repair and not (op.overtaken and job.record(op.label) is None)


def _halves(op: Op) -> Halves:
    if op.repair is None:
        op.repair = Halves()
    halves: Halves = op.repair
    return halves


def _round(job: Job, op: Op, rows: int) -> Round:
    cold = op.cold or job.repairs.warming(op.key)
    seed = seed_of(job.cookie, op.label) ^ job.rank
    repeats = REPEATS_COLD if cold else REPEATS
    longest = patience(job.deadlines.stage_two(flow_bytes(op)))
    return Round(int(seed), asked_most(rows, cold=cold), repeats, longest, job.repairs.answers)


def _unsummed(job: Job, op: Op, rank: int) -> Places:
    """Places of the own rows to which nothing of ``rank`` has been added."""
    own = int(op.place.placement.counts[job.rank])
    slots = job.slots[(op.place.sum_seqs[job.rank] + np.arange(own)) & job.sum_mask]
    here = (slots["cookie"] == job.cookie) & (slots["op"] == op.label)
    return np.flatnonzero(~(here & (slots["ranks"][:, rank >> 6] >> np.uint64(rank & 63) & np.uint64(1)).astype(bool)))


def _ask(job: Job, op: Op, rank: int, places: Places, rows: int, flags: Flag) -> None:
    for first, body in encode_repair(places, job.store.width):
        head = job.header(
            PacketType.REPAIR, op.label, op.place.layout.tag, owner=rank, row=first, rows=rows, flags=flags
        )
        job.tell(rank, head, body)
        job.counters["repair_asked"] += 1


def _count(job: Job, half: int, rank: int, asked: int, came: int) -> None:
    job.repairs.asked[half, rank] += asked
    job.repairs.came[half, rank] += came
    job.counters["repair_rows_asked"] += asked
    job.counters["rows_repaired"] += came


# -- answering ----------------------------------------------------------------------------------------------------


def take_request(job: Job, head: Any, body: bytes) -> None:
    """Notes what a REPAIR packet with rows asks for; ``answer`` sends it. Nobody asks before a finished mark."""
    label, first_half = int(head["op"]), bool(int(head["flags"]) & Flag.FIRST_HALF)
    mark = job.marks.contributed if first_half else job.marks.published
    places = decode_repair(body, int(head["row"]), int(head["rows"]))
    if places is None or serial_distance(label, mark) > 0:
        job.counters["control_refused"] += 1
        return
    job.counters["repair_requests"] += 1
    job.repairs.requests.add(Request(label, int(head["sender"]), first_half, int(head["layout"]), places))


def take_gone(op: Op, head: Any) -> None:
    """A rank says that no more of what it was asked for will come."""
    if op.repair is not None:
        half = op.repair.first if int(head["flags"]) & Flag.FIRST_HALF else op.repair.second
        if half is not None:
            half.gone(int(head["sender"]))


def answer(job: Job, ops: dict[int, Op], now: int) -> int:
    """Sends rows that others have asked for, as far as the budget goes; returns when to go on (0: nothing left)."""
    repairs, pace = job.repairs, job.traffic.pace
    held: set[int] = set()  # askers that have had their share
    again = 0

    def sent(count: int) -> None:
        job.counters["repair_rows_sent"] += count

    while (request := repairs.requests.newest(held)) is not None:
        found = _find(job, ops, request)
        if found is None:
            repairs.requests.done(request, len(request.places))
            _gone(job, request)
            continue
        rows, states, exists, at = found
        stride = rows.shape[1]
        asker, rate = request.asker, job.queue.pacer.rate(request.asker)
        burst = min(len(request.places), burst_packets(stride))
        granted = repairs.take(asker, len(request.places) * stride, now, pace, rate)
        count = granted // stride
        repairs.give(asker, granted - count * stride, rate)
        if count == 0:
            held.add(asker)
            look = now + repairs.enough_in(asker, burst * stride, rate)
            again = min(again, look) if again else look
            continue
        part = at[request.places[:count]]
        there = part[exists[part]]
        request.holes |= len(there) < count
        out = rows[there]
        restamp(out, states[there], int(Flag.REPEAT))
        until = now + job.config.stage_max
        job.queue.submit(request.label, PacketType.RESULT, [(asker, out)], until, sent, now)
        repairs.requests.done(request, count)
        if request.holes and not len(request.places):
            _gone(job, request)
    return again


def _find(
    job: Job, ops: dict[int, Op], request: Request
) -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.bool_], Places] | None:
    """The list that is asked for: packets, partial checks, and which of them exist, in memory's order; and where in it
    every place is. None if it is not kept.
    """
    op, asker, first = ops.get(request.label), request.asker, 0
    if request.first_half:
        if op is None or not op.encoded or op.abstains or op.outcome.late:
            return None
        placement, b = op.place.placement, op.buffers
        own = slice(int(placement.starts[asker]), int(placement.starts[asker] + placement.counts[asker]))
        place, rows, states, exists = op.place, b.packets[own], b.partials[own], b.skipped[b.group[own]] == 0
        first = b.first[asker]
    elif op is not None and op.published:
        place, results = op.place, op.buffers.own
        rows, states, exists = results.packets, results.partials, results.usable.astype(bool)
    else:
        kept = job.pool.kept(request.label)
        if kept is None:
            return None
        place, results = kept
        rows, states, exists = results.packets, results.partials, results.usable.astype(bool)
    if place.layout.tag != request.layout or int(request.places[-1]) >= len(rows):
        return None
    return rows, states, exists, (np.arange(len(rows)) - first) % len(rows)


def _gone(job: Job, request: Request) -> None:
    """Tells the asker that this is all, once per op (``rows`` tells it from the answer to a question for marks)."""
    if not job.repairs.requests.say_gone(request.label, request.asker, first_half=request.first_half):
        return
    flags = Flag.FIRST_HALF if request.first_half else Flag(0)
    head = job.header(PacketType.GONE, request.label, request.layout, owner=request.asker, rows=1, flags=flags)
    job.tell(request.asker, head)
    job.counters["repair_gone"] += 1
