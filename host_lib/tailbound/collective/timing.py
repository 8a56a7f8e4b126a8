"""Deadlines of ops: what is applied to one, and what they learn from the stamps of those that are over.

Clock-4 to clock-6 and clock-11; and clock-14: who would have met one is suspect no more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable

import numpy as np

from tailbound.collective.op import Half, Op, Pending
from tailbound.collective.speaker import Speaker
from tailbound.kernel.core import core
from tailbound.transport.config import MS
from tailbound.transport.deadline import Sample
from tailbound.transport.membership import Suspicion
from tailbound.transport.steps import step_distance, step_of
from tailbound.wire.packets import record_of
from tailbound.wire.ranks import ranks_of
from tailbound.wire.schema import MAX_RANKS, OWN_OP, Why, op_label, op_slot, serial_distance

#: Stamps are read this many steps later (clock-5), when late rows have come too.
_SETTLED_AFTER = 2
_PENDING_MOST = 1024
#: Once a size is known, ops and steps that follow each other faster than so many floors teach nothing new, and reading
#: stamps costs time. What a deadline cut does.
_APART, _STEPS_APART = 2, 10
#: What a user can do about a rank that no rank waits for.
WHO_WAITS = (
    "Where it evaluates or writes a checkpoint, state.hold() lets the others wait; where it was stopped, "
    "tailbound.torch.batches() lets it catch up"
)
#: Part of an op's rows that a switch may have released early without making its times those of a deadline.
_PARTIAL = 0.02

_Op = record_of(OWN_OP)


# -- what is applied ---------------------------------------------------------------------------------------------


def cut(elapsed: int, flows: Iterable[tuple[int, int]]) -> int | None:
    """What a deadline has cut off.

    Args:
        elapsed: since the flows began, ns.
        flows: (rows that came, rows expected) of every flow whose sender has not said that it is through; one of
            which nothing came says nothing.

    Returns:
        How long the slowest would have taken at its pace (None: nothing was cut), in place of an arrival that will
        never be seen, since senders drop what no rank takes any more, but twice what it had at most: a rank that
        stopped in the middle has no pace.
    """
    slowest = [elapsed * expected // came for came, expected in flows if 0 < came < expected]
    return min(max(slowest), 2 * elapsed) if slowest else None


def cut_off(job: Speaker, op: Op, half: Half, elapsed: int, flows: Iterable[tuple[int, int]]) -> None:
    """Counts an end at the deadline, and keeps what it cut off for the next ones; see ``cut``."""
    op.outcome.deadline_hits += 1
    job.counters["seal_deadline_hits" if half is op.first else "result_deadline_hits"] += 1
    half.cut = cut(elapsed, flows)


def suspect(
    job: Speaker,
    op: Op,
    absent: set[int],
    halves: tuple[Suspicion, ...],
    what: str,
    then: str,
    idle: Collection[int] = (),
) -> None:
    """Counts ranks of which nothing came in an op, and tells of those who become suspect by that (clock-14).

    Args:
        halves: of membership, in which they are absent.
        what: they have not done.
        then: what follows.
        idle: ranks that had nothing to bring to it.
    """
    membership, new = job.membership, set[int]()
    counting = [half for half in halves if absent or half.counting]  # none, as a rule
    if counting and job.in_step and not op.overtaken and membership.blames(op.place.step, op.admitted):
        for half in counting:
            new |= half.absent(absent, op.label, idle)
    stage = "results" if halves[0] is membership.result else "contributions"
    for rank in sorted(new & membership.suspects):
        if (named := job.records.newest(rank)) is not None:  # else it counts as dead until the next turn
            membership.heard(rank, step_of(named))
        job.events.emit(
            "suspect",
            f"rank {rank} has {what} {job.config.suspect_after} ops (last: op {op.name}); {then}. {WHO_WAITS}",
            suspect=rank, stage=stage, op=op.name,
        )  # fmt: skip


def forgive(job: Speaker, ops: Iterable[tuple[int, int]]) -> bool:
    """Clears suspects that would have met the deadline of one of ``ops`` in which they were not waited for (clock-14).

    Judged by the stamps of their rows, which are taken after the window has moved on, too.

    Args:
        job: of this rank.
        ops: label and start of each.

    Returns:
        Whether there was one.
    """
    halves = job.membership.contribution, job.membership.result
    if not any(half.suspects for half in halves):
        return False
    limits: dict[int, tuple[int, int]] = {}  # by step
    found = False
    for label, start in ops:
        record, step = job.records.of(label), step_of(label)
        if not start or record is None:
            continue
        came = [_came(job, label, record, half, stamp) for half, stamp in zip(halves, _stamps(job, step), strict=True)]
        if not any(came):
            continue
        if step not in limits:
            limits[step] = _limits(job, step)
        for half, ranks, limit in zip(halves, came, limits[step], strict=True):
            for rank, when in ranks:
                if when <= start + limit:
                    half.clear(rank)
                    job.publish_live()
                    found = True
    return found


def _stamps(job: Speaker, step: int) -> tuple[str, str]:
    """For both halves of the ops of ``step``: the stamp that counts.

    Where a switch sums, rows go elsewhere: who was heard in time takes part.
    """
    if job.switch is not None and job.switched(job.sequence.map_at(step)):
        return "first_us", "first_us"
    return "row_us", "published_us"


def _limits(job: Speaker, step: int) -> tuple[int, int]:
    """For both halves of the largest ops of ``step``: how long after the start a rank is in time."""
    largest, terms, fast = _Op(label=op_label(step, 0)), job.terms.pointer, core().fast
    job.deadlines.tell(largest, job.deadlines.largest)
    first = fast.tb_longest(terms, ctypes.addressof(largest), 0)
    switched = job.switched(job.sequence.map_at(step))
    return first, first if switched else fast.tb_lasts(terms, ctypes.addressof(largest), 1)


def _came(job: Speaker, label: int, record: np.void, half: Suspicion, stamp: str) -> list[tuple[int, int]]:
    """Suspects that came in an op since they went missing, and when, ns: an op from before that proves nothing."""
    if not half.suspects:
        return []
    at, found, stamps = op_slot(label) * MAX_RANKS, [], job.records.arrivals[stamp]
    for rank in half.suspects:
        us = stamps.item(at + rank)
        known = us and int(record["heard"][rank >> 6]) >> (rank & 63) & 1
        if known and serial_distance(label, half.first_missed[rank]) >= 0:
            found.append((rank, int(record["opened_ns"]) + us * 1000))
    return found


# -- what is learned ---------------------------------------------------------------------------------------------


def note(job: Speaker, op: Op, now: int) -> None:
    """Keeps what is to be known of a finished op when its stamps are read, two steps later (clock-5)."""
    if job.ranks == 1 or op.launch is None:
        return
    in_step, step, floor = job.in_step and not op.overtaken, op.place.step, job.config.floor
    cut = op.first.cut is not None or op.second.cut is not None
    if in_step and not op.held:  # else it was not computing alone
        job.deadlines.step(step, op.launch.launched, now, last=op.place.layout.last)
    if step != job.sampled[0] and op.start - job.sampled[1] >= _STEPS_APART * floor:
        job.sampled = step, op.start
    pending = job.pending
    crowded = step != job.sampled[0] or (bool(pending) and op.start - pending[-1].start < _APART * floor)
    crowded = crowded and not cut and job.deadlines.warm(op.flow_bytes)
    if in_step and op.start and job.sequence.stable and not op.cold and not crowded:
        if len(pending) >= _PENDING_MOST:
            pending.popleft()
        counts = op.place.placement.shares
        waits = bool(counts[job.rank]) or op.switched  # for the first half of others
        pending.append(
            Pending(
                label=op.label,
                step=step,
                flow_bytes=op.flow_bytes,
                start=op.start,
                # who owns nothing has sealed nothing: for it results are on their way from the start
                sealed=op.closed_at or (now if op.switched else op.start),
                own=0 if job.self_late or not op.own_present else op.own_in,
                mended=op.closed_at if op.first.why == Why.COMPLETE and op.first.requested else 0,
                waited_for=tuple({*job.membership.live} - op.abstainers) if waits else (),
                suspects=tuple(job.membership.contribution.suspects - job.membership.gone) if waits else (),
                owners=tuple(p for p in job.membership.owners if counts[p]),
                # what came past the deadline says nothing of the next one
                complete=0 if op.second.over else {Why.COMPLETE: now, Why.QUIET: op.second.quiet}.get(op.second.why, 0),
                transfer_cut=op.first.cut,
                results_cut=op.second.cut,
                switched=op.switched,
                partial=op.partial > _PARTIAL * op.place.layout.shape.rows,
            )
        )
    settle(job)
    job.advertise_deadline(job.deadlines.advertised)


def settle(job: Speaker) -> None:
    """Reads the stamps of ops that are two steps old and lets the deadlines learn from them."""
    pending, step = job.pending, step_of(job.sequence.upcoming)
    if not pending or step_distance(step, pending[0].step) < _SETTLED_AFTER:
        return
    while pending and step_distance(step, pending[0].step) >= _SETTLED_AFTER:
        one = pending.popleft()
        record = job.records.of(one.label)
        if record is not None:
            job.deadlines.learn((_of_switch if one.switched else _of_peers)(job, one, record))
    rtts = [int(job.store.peer_states[p]["rtt_ns"]) for p in (*job.membership.live, *range(job.ranks, job.world))]
    if any(rtts):
        job.deadlines.round_trip(min(max(rtts), 5 * MS))


def _of_peers(job: Speaker, one: Pending, record: np.void) -> Sample:
    """What ``one``, whose rows the ranks own, says by its ``record`` and its arrival stamps (us + 1; 0: none)."""
    opened, at = int(record["opened_ns"]), op_slot(one.label) * MAX_RANKS
    here, stamps = ranks_of(record["heard"].tolist()), job.records.arrivals[at : at + job.ranks]
    begun, ended = stamps["row_us"].tolist(), stamps["contributed_us"].tolist()
    latest = (one.start + job.deadlines.skew_max - opened) // 1000
    came = [p for p in one.waited_for if p in here and begun[p]]
    came += [p for p in one.suspects if p in here and 0 < begun[p] <= latest]
    published = stamps["published_us"][[p for p in one.owners if p in here]].tolist()
    first, results = max((begun[p] for p in came), default=0), max(published, default=0)
    if first or one.own:
        arrived = max(opened + first * 1000 if first else 0, one.own)
        late_by: int | None = max(0, arrived - one.start)
    else:
        late_by = None
    transfers = [1000 * (ended[p] - begun[p]) for p in came if ended[p]]
    if one.transfer_cut is not None and not all(ended[p] for p in came):  # the last row of one never came
        transfers.append(one.transfer_cut)
    if one.mended and late_by is not None:  # the last row that was sent came before those that were sent again
        transfers.append(max(0, one.mended - one.start - late_by))
    last = max(opened + results * 1000 if results else 0, one.complete)
    ends = [max(0, last - one.sealed)] if last else []
    if one.results_cut is not None and not all(published):
        ends.append(one.results_cut)
    return Sample(one.flow_bytes, late_by, max(transfers, default=None), max(ends, default=None), one.step)


def _of_switch(job: Speaker, one: Pending, record: np.void) -> Sample:
    """What ``one``, whose rows a switch owns, says.

    There is no first half that this rank could see. D1 is the time after which it releases rows with what is in,
    learned from when the last rank showed up to when the last result came; D2 is what the release itself may take.
    """
    assert job.switch is not None
    opened, at = int(record["opened_ns"]), op_slot(one.label) * MAX_RANKS
    here, stamps = ranks_of(record["heard"].tolist()), job.records.arrivals[at : at + job.world]
    latest = one.start + job.deadlines.skew_max

    def came(rank: int, stamp: str) -> int:
        us = int(stamps[rank][stamp]) if rank in here else 0
        return opened + 1000 * (us - 1) if us else 0

    shown = [came(p, "first_us") for p in one.waited_for]
    shown += [t for p in one.suspects if 0 < (t := came(p, "first_us")) <= latest]
    shown = [t for t in (*shown, one.own) if t]
    last_shown = max(shown, default=0)
    last = max(came(job.switch, "published_us"), one.complete)
    flushed = one.sealed < last  # rows were released: how long results take without that is not seen
    transfer: int | None = None
    if one.transfer_cut is not None:
        transfer = one.transfer_cut
    elif last and last_shown and not one.partial:
        transfer = max(0, last - max(one.start, min(last, last_shown)))
    # a release of everything takes as long as everything
    second = one.results_cut if one.results_cut is not None else last - one.sealed if flushed else transfer
    first = max(0, last_shown - one.start) if last_shown else None
    return Sample(one.flow_bytes, first, transfer, second, one.step)
