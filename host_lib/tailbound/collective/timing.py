"""Deadlines as they are applied to an op, from what this rank has learned and what the others advertise (clock-6)."""

from __future__ import annotations

from tailbound.collective.job import Job
from tailbound.collective.op import Op
from tailbound.transport.membership import Suspicion
from tailbound.transport.steps import step_distance, step_of
from tailbound.wire.schema import HEADER_BYTES, MAX_RANKS, TIME_UNIT_US, op_slot, serial_distance

_TIME_UNIT = TIME_UNIT_US * 1000
#: Peers that have not been heard for more steps do not count for the median (clock-6).
_HEARD_WITHIN = 2


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


def deadline_1(job: Job, op: Op) -> int:
    """D1 as it is applied to ``op``: until scales are agreed on, a cold op has the whole stage (clock-6, clock-26)."""
    if op.cold:
        return job.config.stage_max
    return job.deadlines.applied(flow_bytes(op), heard(job, job.waited_for, op.place.step))


def deadline_2(job: Job, op: Op) -> int:
    """R as it is applied to ``op``, counted from the start of its clock: every owner's D1 lies inside it (clock-11)."""
    most, size = job.config.stage_max, flow_bytes(op)
    length = 2 * most
    if not op.cold:
        length = job.deadlines.receiver(size, heard(job, job.waited_owners, op.place.step))
        if op.launch is not None:
            length = job.deadlines.hurried(length, size, op.start - op.admitted)
    return min(length, 2 * most)


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
