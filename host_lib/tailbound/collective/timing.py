"""What the stages see of an op, and what deadlines learn from it: between a job's maps and the pure parts.

Stage decisions are in ``transport.stage``, deadlines in ``transport.deadline``; here are the reading of marks, records
and arrival stamps that they need (clock-4 to clock-7, clock-11, clock-12).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.collective import switch_timing
from tailbound.collective.job import Job
from tailbound.collective.op import Op
from tailbound.transport.clock import LEAST_STEP
from tailbound.transport.deadline import MS, Sample
from tailbound.transport.steps import step_distance, step_of
from tailbound.transport.suspicion import Suspicion
from tailbound.wire.jit import compiled
from tailbound.wire.schema import HEADER_BYTES, MAX_RANKS, TIME_UNIT_US, op_slot, serial_distance

_TIME_UNIT = TIME_UNIT_US * 1000
#: Stamps are read this many steps later (clock-5), when late rows have come too.
_SETTLED_AFTER = 2
#: Peers that have not been heard for more steps do not count for the median (clock-6).
_HEARD_WITHIN = 2
_PENDING_MOST = 1024
#: Once a size is known, ops that follow each other faster than this teach nothing new, and reading stamps costs time.
_APART = 20 * MS


class Pending(NamedTuple):
    """An op that is over, until its stamps are read."""

    label: int
    step: int
    flow_bytes: int
    start: int
    waited: int | None
    sealed: int
    own: int
    waited_for: tuple[int, ...]
    suspects: tuple[int, ...]
    owners: tuple[int, ...]
    complete: int
    present: int
    early: bool
    transfer_cut: int | None
    results_cut: int | None
    lost: float
    #: its rows went to a switch, which released more than a few of them early
    switched: bool = False
    partial: bool = False


def flow_bytes(op: Op) -> int:
    """Bytes of the largest flow of an op: one rank's contributions to one owner, headers included."""
    return int(op.place.placement.counts.max()) * (op.place.layout.shape.codes + HEADER_BYTES)


def heard(job: Job, peers: list[int], step: int) -> list[int]:
    """What ``peers`` advertise as D1, ns, of those that were heard in the last two steps (clock-6)."""
    found = []
    for p in peers:
        state = job.store.peer_states[p]
        if state["cookie"] != job.cookie or not state["deadline"]:
            continue
        if step_distance(step, step_of(int(state["newest"]))) <= _HEARD_WITHIN:
            found.append(int(state["deadline"]) * _TIME_UNIT)
    return found


def begin_seal(job: Job, op: Op) -> None:
    """Starts the owner's deadline once the stage clock runs (clock-7c)."""
    if op.start and not op.own_clock.due:
        most = job.config.stage_max
        op.own_clock.begin(op.start, deadline_1(job, op), most, LEAST_STEP)


def begin_give_up(job: Job, op: Op) -> None:
    """Starts the receiver's deadline, so that every owner's lies inside it (clock-11)."""
    if op.start and not op.result_clock.due:
        most, size = job.config.stage_max, flow_bytes(op)
        length = 2 * most
        if not op.cold:
            length = job.deadlines.receiver(size, heard(job, job.waited_owners, op.place.step))
            if op.launch is not None:
                length = job.deadlines.hurried(length, size, op.start - op.admitted)
        op.result_clock.begin(op.start, min(length, 2 * most), 2 * most, LEAST_STEP)


def deadline_1(job: Job, op: Op) -> int:
    """D1 as it is applied to ``op``: until scales are agreed on, a cold op has the whole stage (clock-6, clock-26)."""
    if op.cold:
        return job.config.stage_max
    return job.deadlines.applied(flow_bytes(op), heard(job, job.waited_for, op.place.step))


def on_time(job: Job, label: int, start: int) -> tuple[set[int], set[int]]:
    """Suspects in both halves whose rows of an op would have met its deadline, by their stamps (clock-14)."""
    record = job.record(label)
    first, second = job.contribution_suspicion, job.result_suspicion
    if not start or record is None or not (first.suspects or second.suspects):
        return set(), set()
    deadlines, size = job.deadlines, job.deadlines.largest
    limit_1 = max(deadlines.advertised, *heard(job, job.waited_for, step_of(label)), 0)
    limit_2 = deadlines.receiver(size, heard(job, job.waited_owners, step_of(label)))
    opened, at = int(record["opened_ns"]), op_slot(label) * MAX_RANKS

    switched = job.switched(job.sequence.map_at(step_of(label)))

    def met(suspicion: Suspicion, stamp: str, limit: int) -> set[int]:
        found = set()
        for rank in suspicion.suspects:
            came = int(job.store.arrivals[at + rank][stamp])
            known = int(record["heard"][rank >> 6]) >> (rank & 63) & 1
            # an op from before it went missing proves nothing
            since_then = serial_distance(label, suspicion.first_missed(rank)) >= 0
            if known and came and since_then and opened + came * 1000 <= start + limit:
                found.add(rank)
        return found

    if switched:  # rows go elsewhere: who was heard in time takes part
        return met(first, "first_us", limit_1), met(second, "first_us", limit_1)
    return met(first, "row_us", limit_1), met(second, "published_us", limit_2)


def note(job: Job, op: Op, why: str, now: int) -> None:
    """Keeps what is to be known of a finished op when its stamps are read, two steps later (clock-5)."""
    if job.ranks == 1 or op.launch is None:
        return
    in_step = job.steps.in_step and not op.overtaken
    if in_step:
        cut = op.lost_1 > 0 or op.lost_2 > 0
        job.deadlines.step(op.place.step, op.launch.launched, now, last=op.place.layout.last, cut=cut)
    pending = job.pending
    crowded = bool(pending) and op.start - pending[-1].start < _APART and job.deadlines.warm(flow_bytes(op))
    if in_step and op.start and job.sequence.stable and not op.cold and not op.outcome.skipped and not crowded:
        if len(pending) >= _PENDING_MOST:
            pending.popleft()
        record, counts = job.record(op.label), op.place.placement.counts
        pending.append(
            Pending(
                op.label,
                op.place.step,
                flow_bytes(op),
                op.start,
                op.start - op.admitted if op.admitted <= op.start else None,
                op.spans.sealed or now,
                0 if job.self_late or not op.own_present else op.own_in,
                tuple(p for p in job.waited_for if p not in op.abstainers) if counts[job.rank] or op.switched else (),
                tuple(job.contribution_suspicion.suspects - job.gone) if counts[job.rank] or op.switched else (),
                tuple(p for p in job.waited_owners if counts[p]),
                {"complete": now, "quiet": op.result_quiet.since}.get(why, 0),
                int(record["results_in"]) if record is not None else 0,
                op.early,
                op.transfer_cut,
                op.results_cut,
                max(op.lost_1, op.lost_2),
                op.switched,
                op.partial > switch_timing.PARTIAL * op.place.layout.shape.rows,
            )
        )
    settle(job)


def settle(job: Job) -> None:
    """Reads the stamps of ops that are two steps old and lets the deadlines learn from them."""
    pending, step = job.pending, step_of(job.sequence.upcoming)
    if not pending or step_distance(step, pending[0].step) < _SETTLED_AFTER:
        return
    while pending and step_distance(step, pending[0].step) >= _SETTLED_AFTER:
        one = pending.popleft()
        record = job.record(one.label)
        if record is not None:
            job.deadlines.observe((switch_timing.sample if one.switched else _sample)(job, one, record))
    rtts = [int(job.store.peer_states[p]["rtt_ns"]) for p in (*job.waited_for, *job.extra)]
    if any(rtts):
        job.deadlines.round_trip(min(max(rtts), 5 * MS))
    job.advertise_deadline(job.deadlines.advertised)


def _sample(job: Job, one: Pending, record: Any) -> Sample:
    opened = int(record["opened_ns"])
    at = op_slot(one.label) * MAX_RANKS
    out = np.zeros(5, np.int64)
    last_stamps(
        job.store.arrivals[at : at + job.ranks],
        np.array(record["heard"]),
        np.array(one.waited_for, np.int64),
        np.array(one.suspects, np.int64),
        (one.start + job.deadlines.skew_max - opened) // 1000,
        np.array(one.owners, np.int64),
        out,
    )
    first, transfer, results, open_rows, open_results = (int(x) for x in out)
    if first or one.own:
        arrived = max(opened + first * 1000 if first else 0, one.own)
        late_by: int | None = max(0, arrived - one.start)
    else:
        late_by = None
    transfers = [transfer * 1000] if transfer >= 0 else []
    if open_rows and one.transfer_cut is not None:  # its last row never came
        transfers.append(one.transfer_cut)
    last = max(opened + results * 1000 if results else 0, one.complete)
    ends = [max(0, last - one.sealed)] if last else []
    if open_results and one.results_cut is not None:
        ends.append(one.results_cut)
    regretted = bool(record["late"]) or bool(record["late_results"]) or int(record["results_in"]) > one.present
    return Sample(
        one.flow_bytes,
        late_by,
        max(transfers, default=None),
        max(ends, default=None),
        one.early,
        one.early and regretted,
        one.lost,
        one.step,
        max(ends) + one.sealed - one.start if ends else None,
        one.waited,
    )


@compiled
def last_stamps(
    arrivals: NDArray[Any],
    heard_by: NDArray[np.uint64],
    waited: NDArray[np.int64],
    suspects: NDArray[np.int64],
    latest: int,
    owners: NDArray[np.int64],
    out: NDArray[np.int64],
) -> None:
    """The latest first row, the longest flow (-1: none is whole) and the latest last result, us; stamps are us + 1.

    And how many flows, and how many owners' results, have begun without an end.

    Of ``suspects`` only those count that had come by ``latest``.
    """
    out[:] = 0
    out[1] = -1
    for i in range(waited.shape[0] + suspects.shape[0]):
        trusted = i < waited.shape[0]
        rank = waited[i] if trusted else suspects[i - waited.shape[0]]
        if not (heard_by[rank >> 6] >> np.uint64(rank & 63)) & np.uint64(1):
            continue
        stamp = arrivals[rank]
        begun, ended = np.int64(stamp.row_us), np.int64(stamp.contributed_us)
        if begun == 0 or (not trusted and begun > latest):
            continue
        out[0] = max(out[0], begun)
        if ended:
            out[1] = max(out[1], ended - begun)
        else:
            out[3] += 1
    for rank in owners:
        if (heard_by[rank >> 6] >> np.uint64(rank & 63)) & np.uint64(1):
            published = np.int64(arrivals[rank].published_us)
            out[2] = max(out[2], published)
            out[4] += published == 0
