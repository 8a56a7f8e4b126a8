"""Ops whose rows a switch owns: sending contributions, asking again, reading results (clock-28, kernel-24).

The switch is one more rank, which owns every row and contributes none. Nothing here averages: a row goes to the switch,
and its mean comes to everybody when the last one that is waited for is in. READY and the other control packets go from
rank to rank, so clocks, steps and membership are those of every op.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.scale import scales_of
from tailbound.collective.announce import announce
from tailbound.collective.job import Job
from tailbound.collective.mend import gather
from tailbound.collective.op import Op
from tailbound.collective.tally import gather_flags, read_switched
from tailbound.collective.timing import begin_give_up, begin_seal
from tailbound.transport.config import DEFAULT_PORT
from tailbound.transport.flush import PATIENCE, Again, Places, Retry, View
from tailbound.transport.ledger import Stage
from tailbound.transport.stage import Why, cut, decide
from tailbound.transport.stamp import restamp, stamp_switched
from tailbound.wire.schema import EXPONENT_NONE, Flag, PacketType, serial_distance

_SWITCHED, _SUMS = int(Flag.SWITCHED), int(Flag.SUMS)


# -- first half ---------------------------------------------------------------------------------------------------


def awaited(job: Job, op: Op) -> int:
    """Contributors that rows of ``op`` wait for: live ranks, self included, that have not said that they bring none."""
    return 1 + sum(p not in op.abstainers and p not in op.stayed_out for p in job.waited_for)


def worth_asking(job: Job, op: Op) -> bool:
    """Whether a launch that came after the deadline still lacks results: it can have them by sending its rows."""
    record = job.record(op.label)
    return not op.cold and record is not None and int(record["results_in"]) < op.place.layout.shape.rows


def send(job: Job, op: Op) -> None:
    """Stamps the contributions and sends them, behind a READY to every peer; those of a late launch only on demand."""
    b, place, label = op.buffers, op.place, op.label
    assert job.switch is not None
    head = job.header(
        PacketType.CONTRIBUTION,
        label,
        place.layout.tag,
        owner=job.switch,
        rows=place.layout.shape.rows,
        count=awaited(job, op),
    )
    head["map_id"] = place.placement.owner_map.id
    stamp_switched(
        b.packets,
        head.view(np.uint8),
        b.partials,
        b.packet_exponent,
        b.packet_need,
        scales_of(b.packet_exponent),
        place.result_seq,
        place.placement.row_at,
        label,
    )
    op.encoded = True
    announce(job, op, job.peers, ask=False)
    rows = b.packets[:0] if op.outcome.late else b.packets
    if b.skipped.any():
        rows = rows[b.skipped[b.group[: len(rows)]] == 0]

    def done(packets: int) -> None:
        job.counters["contributions_sent"] += packets
        op.spans.sent = job.now()
        if serial_distance(label, job.marks.contributed) > 0:
            job.marks.contributed = label
        announce(job, op, job.peers, ask=False)  # the mark: what is missing once all have said so was lost

    until = (op.start or op.admitted) + job.config.stage_max
    job.queue.submit(label, PacketType.CONTRIBUTION, [(job.switch, rows)], until, done, job.now())


def _short(job: Job, op: Op) -> bool:
    """Whether it is known that somebody brings no rows to ``op``."""
    return bool(op.abstainers or op.stayed_out) or len(job.waited_for) < len(job.peers)


# -- second half --------------------------------------------------------------------------------------------------


def due(job: Job, op: Op, now: int) -> tuple[Why | None, int]:
    """Why to end ``op`` now, if so, and when to look again if not (clock-11 to clock-13, clock-28)."""
    begin_seal(job, op)
    begin_give_up(job, op)
    return decide(_Results(job, op), op.result_clock, op.result_quiet, now, job.deadlines.quiet, op.admitted)


class _Results:
    """What a worker sees of the switch's results (``stage.Seen``)."""

    def __init__(self, job: Job, op: Op) -> None:
        self._job, self._op = job, op
        record = job.record(op.label)
        self.progress = int(record["results_in"]) if record is not None else 0

    @property
    def left(self) -> int:
        return self._op.place.layout.shape.rows - self.progress

    def complete(self) -> bool:
        return self.left <= 0

    def finished(self) -> bool:
        return False  # a row that is missing can be asked for until the deadline

    def heard(self) -> int:
        return 0  # what a box is late by says nothing about processors

    def repair(self, now: int, *, late: bool) -> tuple[bool, int]:
        job, op = self._job, self._op
        if not op.own_in:  # without rows of its own a rank has nothing to ask with
            return False, 0
        if op.retry is None:
            live = sorted([job.rank, *job.waited_for])
            op.retry = Retry(op.place.layout.shape.rows, live.index(job.rank), len(live), job.patience)
        view = View(
            self.progress,
            lambda: _missing(job, op),
            sent=bool(op.spans.sent),
            finished=_finished(job, op),
            short=_short(job, op),
            due=late or op.retry.flushing or op.own_clock.expired(now, self.progress, self.left),
        )
        for again in op.retry.turn(now, view, job.deadlines.quiet):
            _send_again(job, op, again, now)
        if op.retry.flushing and not op.spans.sealed:
            op.spans.sealed = now
            if view.due and not late:
                _cut_first(job, op, self.progress, now)
        looks = (op.retry.look, 0 if op.retry.flushing else op.own_clock.next_look(now))
        return True, min((t for t in looks if t), default=0)

    def last_call(self, now: int) -> int:
        until = self._op.admitted + 4 * PATIENCE
        return until if self._op.own_in and now < until else 0


def _finished(job: Job, op: Op) -> bool:
    bring = (p for p in job.waited_for if p not in op.abstainers and p not in op.stayed_out)
    return all(job.contributed(p, op.label) for p in bring)


def _missing(job: Job, op: Op) -> Places:
    """Places of the rows whose results are not here, and of which there is an own contribution to ask with."""
    gather(job, op, np.zeros(job.world, np.int64))
    b = op.buffers
    return np.flatnonzero((b.source[op.place.placement.row_at] == -1) & (b.skipped[b.group] == 0))


def _send_again(job: Job, op: Op, again: Again, now: int) -> None:
    assert job.switch is not None
    rows = op.buffers.packets[again.places]
    restamp(rows, op.buffers.partials[again.places], int(Flag.REPEAT | (Flag.FLUSH if again.flush else Flag(0))))
    job.counters["rows_flushed" if again.flush else "rows_sent_again"] += len(rows)
    until = now + job.config.stage_max
    job.queue.submit(op.label, PacketType.RESULT, [(job.switch, rows)], until, None, now)


def _cut_first(job: Job, op: Op, progress: int, now: int) -> None:
    """Counts a deadline at which rows are released, and keeps what it cut off for the next ones."""
    op.outcome.deadline_hits += 1
    job.counters["seal_deadline_hits"] += 1
    op.transfer_cut, op.lost_1 = cut(now - op.start, [(progress, op.place.layout.shape.rows)])


# -- the end ------------------------------------------------------------------------------------------------------


def read(job: Job, op: Op, why: Why, by_owner: NDArray[np.int64]) -> NDArray[np.uint16] | None:
    """Notes where results lie, what their records say, and who was missing.

    Args:
        by_owner: i64[job.world], written: results present.

    Returns:
        Contributors by row (u16[T]) if the results are sums; None if they are mean codes.
    """
    assert job.switch is not None
    b, outcome, rows = op.buffers, op.outcome, op.place.layout.shape.rows
    present = gather(job, op, by_owner)
    job.datapath.fence()
    flags = int(gather_flags(job.result_records, b.source, op.label)) & (_SWITCHED | _SUMS)
    form = flags if flags in (_SWITCHED, _SUMS) else _form(job)
    lost = int(
        read_switched(
            job.result_records, b.source, op.label, form, job.ranks, b.row_scale, b.row_exponent, b.row_count,
            EXPONENT_NONE,
        )
    )  # fmt: skip
    if lost:
        job.counters["results_overwritten"] += lost
    outcome.overwritten = lost
    by_owner[job.switch] -= lost
    here = b.row_count[b.source >= 0]
    wanted = awaited(job, op) - (op.abstains or op.outcome.late)
    op.partial = int((here < wanted).sum())
    job.counters["rows_partial"] += op.partial
    outcome.expected += rows + wanted * len(here)
    outcome.delivered += len(here) + int(np.minimum(here, wanted).sum())
    outcome.missed = rows - len(here)
    if why == "deadline":
        outcome.deadline_hits += 1
        job.counters["result_deadline_hits"] += 1
        elapsed = op.spans.decoding - (op.spans.sealed or op.start)
        op.results_cut, op.lost_2 = cut(elapsed, [(present, rows)])
    job.books.ledger.close(Stage.RESULTS, job.switch, rows, len(here), finished=job.published(job.switch, op.label))
    _suspect(job, op, int(here.max(initial=0)))
    _silence(job, op, present)
    return b.row_count if form == _SUMS else None


def _form(job: Job) -> int:
    return _SUMS if job.config.switch is not None and job.config.switch.form == "sums" else _SWITCHED


def _suspect(job: Job, op: Op, most: int) -> None:
    """Ranks of which nothing was heard in an op are missing in both halves (clock-14); ``most``: contributors seen."""
    record = job.record(op.label)
    absent = {p for p in job.peers if p not in job.gone and not job.contributed(p, op.label)}
    if record is not None:
        absent -= {p for p in absent if int(record["heard"][p >> 6]) >> (p & 63) & 1}
    if most >= job.ranks:
        absent.clear()
    op.outcome.missing |= absent
    in_step, step = job.steps.in_step and not op.overtaken, op.place.step
    new = job.membership.observe_contributions(absent, op.label, in_step=in_step, step=step)
    new |= job.membership.observe_results(absent, op.label, in_step=in_step, step=step)
    for rank in sorted(new):
        job.emit(
            "suspect",
            f"rank {rank} has taken no part in {job.config.suspect_after} ops (last: op {op.name}); "
            "no longer waiting for it",
            suspect=rank, stage="contributions", op=op.name,
        )  # fmt: skip
    job.publish_live()


def _silence(job: Job, op: Op, present: int) -> None:
    """Notes ops of which the switch has sent nothing although rows went to it."""
    rows_sent = op.own_in and op.spans.sent and not op.outcome.late
    if present or not rows_sent:
        job.silent_ops *= not present
        return
    job.silent_ops += 1
    job.counters["switch_silent_ops"] += 1
    if job.silent_ops == job.config.suspect_after:
        switch = job.config.switch
        assert switch is not None
        job.emit(
            "switch_silent",
            f"the switch at {switch.address} has sent no result for {job.silent_ops} ops (last: op "
            f"{op.name}): is it up, and has it an entry for cookie {job.cookie:#x} on UDP port "
            f"{switch.port or job.config.port or DEFAULT_PORT}?",
            op=op.name, address=switch.address,
        )  # fmt: skip
