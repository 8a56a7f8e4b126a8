"""Second half: wait for the results of others, decode, settle the next scales (clock-11 to clock-13)."""

from __future__ import annotations

import numpy as np

from tailbound.codec.hashing import seed_of
from tailbound.codec.scale import warm_exponents
from tailbound.codec.scratch import Scratch
from tailbound.collective import switched, watch
from tailbound.collective.job import Job
from tailbound.collective.mend import ask_results, gather, last_call, owed, settle_results
from tailbound.collective.op import Op
from tailbound.collective.tally import point_own, read_records
from tailbound.collective.timing import begin_give_up, note
from tailbound.transport.stage import Why, cut, decide
from tailbound.wire.schema import EXPONENT_NONE


def collect(job: Job, op: Op, now: int) -> int:
    """Ends ``op`` if its results are in or its time is up; returns when to look again (0: on arrival)."""
    if op.finished or op.launch is None or not op.encoded or not op.sealed:
        return 0
    due, again = switched.due(job, op, now) if op.switched else _due(job, op, now)
    if due is None:
        return again
    op.early |= due == "quiet"
    job.overtime.charge(op.result_clock, now)
    _finish(job, op, due)
    return 0


def _due(job: Job, op: Op, now: int) -> tuple[Why | None, int]:
    """Why to end now, if so, and when to look again if not (clock-11 to clock-13)."""
    begin_give_up(job, op)
    seen, overtime = _Results(job, op), job.overtime
    return decide(seen, op.result_clock, op.result_quiet, now, job.deadlines.quiet, op.admitted, overtime)


class _Results:
    """What a receiver sees of the second half (``stage.Seen``)."""

    def __init__(self, job: Job, op: Op) -> None:
        self._job, self._op = job, op
        record = job.record(op.label)
        # rows that came when their op was too far ahead for a record, or whose record has gone, are there all the same
        self.progress = int(record["results_in"]) if record is not None else _present_of(job, op, job.peers)
        counts = op.place.placement.counts
        self._owners = [p for p in job.waited_owners if counts[p]]

    @property
    def left(self) -> int:
        counts = self._op.place.placement.counts
        return int(sum(counts[p] for p in self._owners)) - self.progress

    def complete(self) -> bool:
        job, op, owners = self._job, self._op, self._owners
        counts = op.place.placement.counts
        if self.progress >= op.place.layout.shape.rows - int(counts[job.rank]):
            return True
        expected = int(sum(counts[p] for p in owners))
        if self.progress < expected or len(owners) == len(job.peers) or owed(job, op):
            return False
        return _present_of(job, op, owners) >= expected

    def finished(self) -> bool:
        return all(self._job.published(p, self._op.label) for p in self._owners)

    def heard(self) -> int:
        return self._job.heard(p for p in self._owners if not self._job.published(p, self._op.label))

    def repair(self, now: int, *, late: bool) -> tuple[bool, int]:
        return ask_results(self._job, self._op, now, late=late)

    def last_call(self, now: int) -> int:
        return last_call(self._job, self._op, now)


def _present_of(job: Job, op: Op, owners: list[int]) -> int:
    by_owner = np.zeros(job.ranks, np.int64)
    gather(job, op, by_owner)
    return int(sum(by_owner[p] for p in owners))


def _finish(job: Job, op: Op, why: Why) -> None:
    assert op.launch is not None
    op.spans.decoding = job.now()
    b, place, outcome = op.buffers, op.place, op.outcome
    shape = place.layout.shape
    point_own(b.own_rows, b.usable, b.scale, b.exponent_next, b.source, b.row_scale, b.row_exponent, EXPONENT_NONE)
    by_owner = np.zeros(job.world, np.int64)
    counts = None
    if op.switched:
        counts = switched.read(job, op, why, by_owner)
    elif job.peers:
        present = gather(job, op, by_owner)
        settle_results(job, op)
        job.datapath.fence()
        outcome.overwritten = int(
            read_records(job.result_records, b.source, op.label, b.row_scale, b.row_exponent, EXPONENT_NONE)
        )
        if outcome.overwritten:
            job.counters["results_overwritten"] += outcome.overwritten
        outcome.delivered += present - outcome.overwritten
        outcome.void = present == 0 and _nobody_had_any(job, op)
        if not outcome.void:
            others = shape.rows - int(place.placement.counts[job.rank])
            outcome.expected += others
            outcome.missed = others - present + outcome.overwritten
            _suspect(job, op, by_owner)
            if why == "deadline":
                _cut(job, op, by_owner)
    coder, out, seed, rotate = op.launch.coder, op.launch.out, seed_of(job.cookie, op.label), op.rotate

    def part(scratch: Scratch, groups: tuple[int, int]) -> int:
        return coder.decode(
            job.store.results,
            b.results,
            b.source,
            b.row_scale,
            shape,
            seed,
            scratch,
            out,
            rotate=rotate,
            groups=groups,
            counts=counts,
        )

    outcome.failed_groups = sum(job.lanes.each(shape.groups, part, divide=coder.divisible))
    empty = outcome.failed_groups == shape.groups
    if outcome.failed_groups:
        job.counters["failed_groups"] += outcome.failed_groups
    if not outcome.void:  # else nothing was lost
        watch.collected(job, op, by_owner)
    outcome.void |= empty and outcome.abstained
    _settle_scales(job, op)
    outcome.label = op.label
    outcome.late = outcome.late or (not op.own_present and not op.abstains)
    outcome.skipped |= op.overtaken and empty
    op.spans.finished = job.now()
    op.finished = True
    note(job, op, why, job.now())


def _nobody_had_any(job: Job, op: Op) -> bool:
    """Whether no rank brought rows, as all say (a loss scale overflows on all ranks, say): no owner is to blame."""
    brought = not (op.abstains or op.outcome.unsent)
    return not brought and bool(job.waited_for) and op.abstainers.issuperset(job.waited_for)


def _cut(job: Job, op: Op, by_owner: np.ndarray) -> None:
    """Counts an end at the deadline, and keeps what it cut off for the next ones."""
    op.outcome.deadline_hits += 1
    job.counters["result_deadline_hits"] += 1
    counts = op.place.placement.counts
    flows = [(int(by_owner[p]), int(counts[p])) for p in job.waited_owners if not job.published(p, op.label)]
    op.results_cut, op.lost_2 = cut(op.spans.decoding - op.spans.sealed, flows)


def _settle_scales(job: Job, op: Op) -> None:
    """Scales of the key's next op (codec-5): the largest next exponent over the result rows of the group.

    A group of which nothing came, the own rows included, had no contributor as far as this rank can know (all ranks
    abstain when a loss scale overflows): its scale stays, or nobody would ever contribute to it again. An op that
    failed as a whole before any scale was known leaves its key cold.
    """
    b, key = op.buffers, op.key
    fresh = warm_exponents(b.row_exponent, op.place.layout.shape.groups)
    lost = fresh == EXPONENT_NONE
    known = job.exponents.get(key)
    if lost.any():
        if lost.all() and (known is None or op.switched):
            return  # a switch that was silent was so for all: what they know is still the same
        if known is not None:
            own = np.zeros(len(fresh), bool)
            own[b.own_groups] = True
            fresh[lost & own] = known[lost & own]
    job.exponents[key] = fresh


def _suspect(job: Job, op: Op, by_owner: np.ndarray) -> None:
    counts = op.place.placement.counts
    absent = {p for p in job.peers if counts[p] and by_owner[p] == 0 and p not in job.gone}
    op.outcome.missing |= absent
    # an owner that is missed no more because it was left out of the map has not published anything by that
    absent |= {p for p in job.result_suspicion.suspects if not counts[p]}
    in_step = job.steps.in_step and not op.overtaken
    for rank in sorted(job.membership.observe_results(absent, op.label, in_step=in_step, step=op.place.step)):
        job.emit(
            "suspect",
            f"rank {rank} has published no result for {job.config.suspect_after} ops (last: op {op.name}); "
            "its rows are filled from the others",
            suspect=rank, stage="results", op=op.name,
        )  # fmt: skip
