"""Ends halves: the mean of what arrived and publishing it (clock-9), and decoding the result."""

from __future__ import annotations

import ctypes
import os

import numpy as np

from tailbound.codec.mean import mean_by
from tailbound.codec.scale import warm_exponents
from tailbound.collective import switched
from tailbound.collective.contribute import coding_of, lay_results, received
from tailbound.collective.job import Job
from tailbound.collective.op import Launch, Op
from tailbound.collective.timing import cut_off, note, suspect
from tailbound.errors import LayoutError
from tailbound.kernel.core import core
from tailbound.transport.steps import step_distance, step_of
from tailbound.wire.ranks import ranks_of
from tailbound.wire.schema import EXPONENT_NONE, Flag, Phase, Stage, Verdict, Why

#: What to do about ranks that disagree on a bucket.
SAME_MODEL = (
    "All ranks must train the same model with the same bucket sizes, bits and use of a loss scale, take part in every "
    "backward pass, and (where ranks may come back) use parameters in the same order, by which DDP fills its buckets"
)

# -- first half, owner side ----------------------------------------------------------------------------------------


def seal(job: Job, op: Op) -> None:
    """Closes the first half of ``op``: averages what came, and publishes it; where the library has, learns from it.

    Raises:
        OSError: the slots cannot be sealed.
        MemoryError: there is none for the results.
    """
    owner, at = ctypes.addressof(job.owner), ctypes.addressof(op)
    if not op.sealed and (error := core().fast.tb_close_first(owner, at, op.abstains, job.now())):
        raise OSError(error, os.strerror(error))
    job.accounts.closed(op)
    op.outcome.doubtful = op.own > 0 and _left_behind(job, op)
    if job.ranks > 1:
        _suspect(job, op)
    missed = not op.own_present and not op.outcome.abstained and not op.encoded
    if missed or job.self_misses:
        job.self_misses = job.self_misses + 1 if missed else 0
    if not op.queued:
        _publish(job, op)
    op.unnoted = 0
    job.channels.count(op.aims)
    job.counters["rows_without_contributor"] += op.missing
    if job.ranks > 1:  # the others have their rows on the way by now
        _learn(job, op)


def _left_behind(job: Job, op: Op) -> bool:
    """Whether others have gone on without this rank, so that one of them may be the reference by now (clock-21).

    They have named the step after the next; the ops of a pass may be of two steps (FSDP).
    """
    return step_distance(step_of(job.newest(op.label)), step_of(op.label)) > 1


def _lies_elsewhere(job: Job, op: Op) -> bool:
    """Whether others have placed the op by an owner map of which this rank has not heard in time.

    They hold others' means of its own rows then, to which nobody contributed here.
    """
    if not op.outcome.missing:  # as a rule
        return False
    newer = op.place.placement.owner_map != job.sequence.map_at(op.place.step)
    return newer or job.misses_map(job.membership.here)


def _suspect(job: Job, op: Op) -> None:
    """Suspects ranks of which nothing came (clock-14), before results leave: these go to others first."""
    tally = op.buffers.tally[Stage.CONTRIBUTIONS]
    op.outcome.expected += tally.due
    op.outcome.delivered += tally.came
    absent = ranks_of(tally.absent)
    op.outcome.missing |= absent
    _name_strangers(job, op, absent)
    suspect(job, op, absent, (job.membership.contribution,), "sent no contribution for", "no longer waiting for it")
    job.publish_live()


def _learn(job: Job, op: Op) -> None:
    """Enters the first half of an op in what is learned."""
    if op.first.why == Why.DEADLINE:
        through = job.records.all_contributed(job.membership.here, op.label)
        late = set(job.membership.live) - {*through} - op.abstainers
        came = op.buffers.came[Stage.CONTRIBUTIONS]
        cut_off(job, op, op.first, op.closed_at - op.start, [(came[p], op.own) for p in late])
    job.accounts.settle(op.first, Stage.CONTRIBUTIONS)


def _name_strangers(job: Job, op: Op, absent: set[int]) -> None:
    """A rank of which nothing counts because its layout is another one is not missing but wrong; the op says so."""
    for rank in sorted(absent):
        refused = job.records.count(rank, Verdict.LAYOUT_MISMATCH)
        if refused and op.launch is not None and op.outcome.error is None:
            op.outcome.error = LayoutError(
                f"rank {job.rank} and rank {rank} disagree on op {op.name}: {refused} packets "
                f"of rank {rank} had another layout. {SAME_MODEL}"
            )


def _publish(job: Job, op: Op) -> None:
    """Makes the means and sends them to every peer, but for rows to which no rank contributed."""
    if not (op.mean and op.own_present):
        lay_results(job, op, own_present=bool(op.own_present))
    mean_by(job.threads, op.mean, op.own)
    if op.abstains:
        op.say |= Flag.ABSTAIN  # who missed the word hears it with the mark that says that nothing more will come
    if op.outcome.overflowed:
        op.say |= Flag.OVERFLOW  # every owner hands it on, so that all ranks hear it in the same op
    op.aim_at(job.channels.aims())
    if core().waits.tb_hand_out(ctypes.addressof(job.owner), ctypes.addressof(op), job.now()):
        raise MemoryError("no memory for results")
    job.queue.pump(job.now())


# -- second half ---------------------------------------------------------------------------------------------------


def finish(job: Job, op: Op) -> None:
    """Closes the second half of ``op``: decodes what is there."""
    assert op.launch is not None
    outcome = op.outcome
    if not op.decoded:
        owner, at = ctypes.addressof(job.owner), ctypes.addressof(op)
        job.threads.through(core().waits.tb_finish, owner, at, job.threads.rest, job.now())
    outcome.overwritten = op.overwritten
    (switched.note if op.switched else _note)(job, op)
    if op.code:
        outcome.clipped = op.buffers.encodes.sum
    outcome.failed_groups = _decoded(job, op, op.launch)
    empty = outcome.failed_groups == op.place.layout.shape.groups
    if outcome.failed_groups:
        job.counters["failed_groups"] += outcome.failed_groups
    if not outcome.void:  # else nothing was lost
        job.accounts.collected(op)
    outcome.void |= empty and outcome.abstained
    if op.switched:
        _settle_scales(job, op)
    outcome.label = op.label
    owns = bool(op.place.placement.shares[job.rank])  # who owns none has sealed none without the own gradient
    outcome.late = outcome.late or (owns and not op.own_present and not op.abstains)
    if _left_behind(job, op):
        outcome.doubtful |= not owns  # an owner has told others by its results
        job.membership.woke(op.place.step)
    outcome.doubtful |= owns and _lies_elsewhere(job, op)
    outcome.skipped |= op.overtaken and empty
    op.second.phase = Phase.CLOSED
    note(job, op, job.now())


def _decoded(job: Job, op: Op, launch: Launch) -> int:
    """Groups of which nothing is there, once the rest is decoded; a device has that still to do."""
    b, shape = op.buffers, op.place.layout.shape
    if not op.decode:
        rows = received(job, b, switched=op.switched)
        return launch.coder.decode(rows, shape, coding_of(job, op), launch.out, job.threads)
    if b.decodes.failed:
        raise ValueError(f"op {op.name}: a row lies outside the ring of results, or the own ones")
    return b.decodes.sum


def _settle_scales(job: Job, op: Op) -> None:
    """Scales of the key's next op where a switch sums (codec-5): the largest next exponent over a group's result rows.

    A switch takes the first exponent of a row, and refuses all others: a rank that lacks a group makes the key cold,
    asks for the scales, and stays out if others know them.
    """
    fresh = warm_exponents(op.buffers.row_exponent, op.place.layout.shape.layout.rows)
    if np.minimum.reduce(fresh) != EXPONENT_NONE:  # which is the least of all
        job.exponents[op.key] = fresh
        return
    for key in [key for key in job.exponents if key[:3] == op.key[:3]]:  # under older exponents, too
        del job.exponents[key]


def _note(job: Job, op: Op) -> None:
    """Notes how many results of ranks are there and who was missing, at the end of an op.

    A missing contribution costs its row one contributor, which the mean allows for, and a missing result costs every
    replica; but both are asked for while others are still sending, as a rule (clock-23).
    """
    outcome, place = op.outcome, op.place
    if not job.peers:
        return
    job.accounts.settle(op.second, Stage.RESULTS)
    outcome.delivered += op.present - op.overwritten
    outcome.void = bool(op.nothing)  # no owner is to blame
    if outcome.void:
        return
    others = op.rows - op.own
    outcome.expected += others
    outcome.missed = others - op.present + op.overwritten
    _suspect_owners(job, op, ranks_of(op.buffers.tally[Stage.RESULTS].absent))
    if op.second.why == Why.DEADLINE:
        came, counts = op.buffers.came[Stage.RESULTS], place.placement.shares
        through = job.records.all_published(job.membership.owners, op.label)
        flows = [(came[p], counts[p]) for p in {*job.membership.owners} - {*through}]
        cut_off(job, op, op.second, op.second.over - (op.closed_at or op.start), flows)


def _suspect_owners(job: Job, op: Op, absent: set[int]) -> None:
    """Suspects owners of which nothing came; an op in which a rank owns no rows does not clear it."""
    op.outcome.missing |= absent
    placement = op.place.placement
    without = {p for p in job.peers if not placement.shares[p]} if 0 in placement.shares else set[int]()
    # who was left out of the map is present by its contributions, since it has no results to publish
    left_out = without.difference(placement.owner_map.owners)
    without -= {*job.records.all_contributed(left_out, op.label)} - job.membership.contribution.suspects
    then = "its rows count as zero until others own them"
    suspect(job, op, absent, (job.membership.result,), "published no result for", then, without)
