"""Ops whose rows a switch owns: sending contributions, asking again, what results come to (clock-28, kernel-24).

The switch is one more rank, which owns every row and contributes none. Nothing here averages: a row goes to the switch,
and its mean comes to everybody when the last one that is waited for is in. READY and the other control packets go from
rank to rank, so clocks, steps and membership are those of every op.
"""

from __future__ import annotations

import numpy as np

from tailbound.codec.scale import scales_of
from tailbound.collective.job import Job
from tailbound.collective.op import Op
from tailbound.collective.speaker import Speaker
from tailbound.collective.timing import cut_off, suspect
from tailbound.transport.config import DEFAULT_PORT
from tailbound.transport.control import Stamp
from tailbound.wire.ranks import ranks_of
from tailbound.wire.schema import PacketType, Why


def send(job: Job, op: Op) -> None:
    """Behind a READY to every peer; rows of a late launch only on demand."""
    b, place, label = op.buffers, op.place, op.label
    (memory, _, partials), rows = b.contributions, place.layout.shape.rows
    assert job.switch is not None
    owners, count = place.placement.owner_map.id, _awaited(job, op)
    head = job.header(PacketType.CONTRIBUTION, label, place.tag, map_id=owners, weight=1, count=count)
    # a switch copies ``seq`` and ``scale`` into results: the place of the result's row, and the value of code 255
    exponents, needs, _ = b.scales
    stamp = Stamp(
        memory, partials, place.placement.row_at, b.group, exponents=exponents, needs=needs,
        scales=scales_of(exponents),
    )  # fmt: skip
    stamp.write(head, [(0, rows, rows - 1, place.result_seq, job.switch, rows)], label)
    op.largest = op.burst
    job.announce(op, job.peers)
    job.send_own(op, [(job.switch, memory[:0] if op.outcome.late else memory)])


def note(job: Job, op: Op) -> None:
    """Notes how many results are there and who was missing, at the end of an op."""
    b, outcome, rows = op.buffers, op.outcome, op.rows
    here = b.row_count[b.source >= 0]
    wanted = _awaited(job, op) - (op.abstains or op.outcome.late)
    op.partial = int((here < wanted).sum())
    outcome.expected += rows + wanted * len(here)
    outcome.delivered += len(here) + int(np.minimum(here, wanted).sum())
    outcome.missed = rows - len(here)
    late = 0 < op.second.deadline < op.admitted
    if 0 < op.first.deadline <= op.closed_at and not late:
        cut_off(job, op, op.first, op.closed_at - op.start, [(op.came_by, rows)])
    if op.second.why == Why.DEADLINE:
        cut_off(job, op, op.second, op.collected_at - (op.closed_at or op.start), [(op.present, rows)])
    _suspect(job, op, int(here.max(initial=0)))
    _silence(job, op, op.present)


def _awaited(known: Speaker, op: Op) -> int:
    """Contributors that rows of ``op`` wait for: live ranks, self included, that have not said that they bring none."""
    return 1 + len({*known.membership.live} - op.abstainers - op.stayed_out)


def _suspect(job: Job, op: Op, most: int) -> None:
    """Ranks of which nothing was heard in an op are missing in both halves (clock-14); ``most``: contributors seen."""
    record = job.records.of(op.label)
    heard = ranks_of(record["heard"].tolist()) if record is not None else set()
    due = {*job.membership.here} - heard if most < job.ranks else set()
    absent = due - {*job.records.all_contributed(due, op.label)}
    op.outcome.missing |= absent
    halves = job.membership.contribution, job.membership.result
    suspect(job, op, absent, halves, "taken no part in", "no longer waiting for it")
    job.publish_live()


def _silence(job: Job, op: Op, present: int) -> None:
    """Notes ops of which the switch has sent nothing although rows went to it."""
    rows_sent = op.own_in and op.sent_at and not op.outcome.late
    if present or not rows_sent:
        job.silent_ops *= not present
        return
    job.silent_ops += 1
    if job.silent_ops == job.config.suspect_after:
        switch = job.config.switch
        assert switch is not None
        job.events.emit(
            "switch_silent",
            f"the switch at {switch.address} has sent no result for {job.silent_ops} ops (last: op "
            f"{op.name}): is it up, and has it an entry for cookie {job.cookie:#x} on UDP port "
            f"{switch.port or job.config.port or DEFAULT_PORT}?",
            op=op.name, address=switch.address,
        )  # fmt: skip
