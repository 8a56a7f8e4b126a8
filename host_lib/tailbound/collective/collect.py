"""Second half: wait for the results of others, decode, settle the next scales (CLOCKS.md rules 11-13)."""

from __future__ import annotations

import numpy as np

from tailbound.codec.decode import decode
from tailbound.codec.hashing import seed_of
from tailbound.codec.scale import warm_exponents
from tailbound.collective.job import Job, log
from tailbound.collective.op import Op
from tailbound.collective.tally import gather_results, point_own, read_records
from tailbound.wire.schema import EXPONENT_NONE, TIME_UNIT_US


def collect(job: Job, op: Op, now: int) -> int:
    """Ends ``op`` if its results are in or its time is up; returns when to look again (0: on arrival)."""
    if op.finished or op.launch is None or not op.encoded or not op.published:
        return 0
    due, again = _due(job, op, now)
    if due is None:
        return again
    if due == "deadline":
        op.outcome.deadline_hits += 1
        job.counters["result_deadline_hits"] += 1
    _finish(job, op, due)
    return 0


def _due(job: Job, op: Op, now: int) -> tuple[str | None, int]:
    config, shape = job.config, op.place.layout.shape
    counts = op.place.placement.counts
    owners = job.waited_owners
    expected = int(sum(counts[p] for p in owners))
    record = job.record(op.label)
    present = int(record["results_in"]) if record is not None else 0
    others = shape.rows - int(counts[job.rank])
    if present >= others:
        return "complete", 0
    if present >= expected and len(owners) < len(job.peers) and _present_of(job, op, owners) >= expected:
        return "complete", 0
    finished = all(job.published(p, op.label) for p in owners)
    if op.result_quiet.passed(now, finished, present, config.quiet):
        return "quiet", 0
    if op.start:
        length = 2 * config.stage_max if op.cold else _longest_deadline(job) + config.deadline_2
        op.result_clock.begin(op.start, length, 2 * config.stage_max)
        if op.result_clock.expired(now, present):
            return "deadline", 0
    looks = [t for t in (op.result_quiet.next_look(config.quiet), op.result_clock.next_look(now)) if t]
    return None, min(looks, default=0)


def _longest_deadline(job: Job) -> int:
    """Largest D1 advertised by a live owner, own included (rule 11), so that every owner's seal lies inside."""
    states = job.store.peer_states
    heard = [int(states[p]["deadline"]) for p in job.waited_owners if states[p]["cookie"] == job.cookie]
    return min(max([job.config.deadline_1, *(d * TIME_UNIT_US * 1000 for d in heard)]), job.config.stage_max)


def _present_of(job: Job, op: Op, owners: list[int]) -> int:
    by_owner = np.zeros(job.ranks, np.int64)
    _gather(job, op, by_owner)
    return int(sum(by_owner[p] for p in owners))


def _gather(job: Job, op: Op, by_owner: np.ndarray) -> int:
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


def _finish(job: Job, op: Op, why: str) -> None:
    assert op.launch is not None
    b, place, outcome = op.buffers, op.place, op.outcome
    shape = place.layout.shape
    point_own(
        b.own_rows, b.usable, b.scale, b.exponent_next, b.source, b.row_scale, b.row_exponent, EXPONENT_NONE
    )
    by_owner = np.zeros(job.ranks, np.int64)
    if job.peers:
        present = _gather(job, op, by_owner)
        job.datapath.fence()
        outcome.overwritten = int(
            read_records(
                job.result_records, b.source, op.label, b.row_scale, b.row_exponent, EXPONENT_NONE
            )
        )
        if outcome.overwritten:
            job.counters["results_overwritten"] += outcome.overwritten
        outcome.delivered += present - outcome.overwritten
        outcome.expected += shape.rows - int(place.placement.counts[job.rank])
        _suspect(job, op, by_owner)
    outcome.failed_groups = int(
        decode(
            job.store.results,
            b.results,
            b.source,
            b.row_scale,
            shape,
            seed_of(job.cookie, op.label),
            job.scratch,
            op.launch.out,
            rotate=job.config.rotate,
        )
    )
    if outcome.failed_groups:
        job.counters["failed_groups"] += outcome.failed_groups
    _settle_scales(job, op)
    outcome.label = op.label
    outcome.late = outcome.late or (not op.own_present and not outcome.abstained)
    op.finished = True


def _settle_scales(job: Job, op: Op) -> None:
    """Scales of the key's next op (CODEC.md rule 5): the largest next exponent over the result rows of the group.

    A group of which nothing came, the own rows included, had no contributor as far as this rank can know (all ranks
    abstain when a loss scale overflows): its scale stays, or nobody would ever contribute to it again. An op that
    failed as a whole before any scale was known leaves its key cold.
    """
    b, key = op.buffers, op.place.layout.key
    fresh = warm_exponents(b.row_exponent, op.place.layout.shape.groups)
    lost = fresh == EXPONENT_NONE
    known = job.exponents.get(key)
    if lost.any():
        if known is None and lost.all():
            return
        if known is not None:
            own = np.zeros(len(fresh), bool)
            own[b.own_groups] = True
            fresh[lost & own] = known[lost & own]
    job.exponents[key] = fresh


def _suspect(job: Job, op: Op, by_owner: np.ndarray) -> None:
    counts = op.place.placement.counts
    absent = {p for p in job.peers if counts[p] and by_owner[p] == 0 and p not in job.gone}
    for peer in job.peers:
        if peer not in job.gone:
            job.by_owner[peer] += (int(counts[peer]), int(by_owner[peer]))
    op.outcome.missing |= absent
    for rank in sorted(job.result_suspicion.observe(absent, op.label)):
        log.warning(
            "rank %d: rank %d has published no result for %d ops (last: op %#x); its rows are filled from the others",
            job.rank, rank, job.config.suspect_after, op.label,
        )  # fmt: skip
