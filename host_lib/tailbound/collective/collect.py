"""Second half: decode what came, and settle the next scales."""

from __future__ import annotations

import numpy as np

from tailbound.codec.hashing import seed_of
from tailbound.codec.scale import warm_exponents
from tailbound.codec.scratch import Scratch
from tailbound.collective import accounting
from tailbound.collective.actions import Finish
from tailbound.collective.aggregation import of
from tailbound.collective.job import Job
from tailbound.collective.op import Op, Phase
from tailbound.collective.samples import note
from tailbound.collective.tally import point_own
from tailbound.wire.schema import EXPONENT_NONE


def finish(job: Job, op: Op, action: Finish) -> None:
    """Closes the second half of ``op``: decodes what is there."""
    assert op.launch is not None
    op.spans.decoding = job.now()
    job.overtime.charge(op.second.clock, op.spans.decoding)
    op.second.why = action.why
    b, place, outcome = op.buffers, op.place, op.outcome
    shape = place.layout.shape
    point_own(b.own_rows, b.usable, b.scale, b.exponent_next, b.source, b.row_scale, b.row_exponent, EXPONENT_NONE)
    by_owner = np.zeros(job.world, np.int64)
    counts = of(op).read(job, op, action.why, by_owner)
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
        accounting.collected(job, op, by_owner)
    outcome.void |= empty and outcome.abstained
    _settle_scales(job, op)
    outcome.label = op.label
    outcome.late = outcome.late or (not op.own_present and not op.abstains)
    outcome.skipped |= op.overtaken and empty
    op.spans.finished = job.now()
    op.second.phase = Phase.CLOSED
    note(job, op, action.why, job.now())


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
            return  # what a switch has not sent nobody has: what they know is still the same
        if known is not None:
            own = np.zeros(len(fresh), bool)
            own[b.own_groups] = True
            fresh[lost & own] = known[lost & own]
    job.exponents[key] = fresh
