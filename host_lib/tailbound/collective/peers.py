"""Ops whose rows the ranks own: reading results.

Contributions and results are repaired in every op (clock-23). A missing contribution costs its row one contributor,
which the mean allows for, and a missing result costs every replica; but both are asked for while others are still
sending, as a rule, so that a row that was lost costs no op its time.
"""

from __future__ import annotations

import ctypes

from tailbound.collective.job import Job
from tailbound.collective.op import Op
from tailbound.collective.tally import Counts, gather, read_records, settle
from tailbound.collective.timing import cut_off, suspect
from tailbound.kernel.core import core
from tailbound.wire.ranks import ranks_of
from tailbound.wire.schema import Stage, Why


def read(job: Job, op: Op, by_owner: Counts) -> None:
    """Notes which results are there (``by_owner``, written) and who was missing, at the end of an op."""
    outcome, place = op.outcome, op.place
    if not job.peers:
        return
    present = gather(job, op, by_owner)
    settle(job, op.second, Stage.RESULTS)
    job.datapath.fence()
    outcome.overwritten = read_records(job, op)
    if outcome.overwritten:
        job.counters["results_overwritten"] += outcome.overwritten
    outcome.delivered += present - outcome.overwritten
    # no rank brought rows, as all say: no owner is to blame
    outcome.void = present == 0 and bool(core().fast.tb_nobody_had_any(job.terms.pointer, ctypes.addressof(op)))
    if outcome.void:
        return
    others = place.layout.shape.rows - place.placement.shares[job.rank]
    outcome.expected += others
    outcome.missed = others - present + outcome.overwritten
    _suspect(job, op, ranks_of(job.accounts.close(op, by_owner).absent))
    if op.second.why == Why.DEADLINE:
        counts = place.placement.shares
        through = job.records.all_published(job.membership.owners, op.label)
        late = {*job.membership.owners} - {*through}
        flows = [(by_owner[p], counts[p]) for p in late]
        cut_off(job, op, op.second, op.second.over - (op.closed_at or op.start), flows)


def _suspect(job: Job, op: Op, absent: set[int]) -> None:
    """Suspects owners of which nothing came."""
    op.outcome.missing |= absent
    # who was left out of the map is present again by its contributions, since it has no results to publish
    without = {p for p in job.membership.result.suspects if not op.place.placement.shares[p]}
    present = {*job.records.all_contributed(without, op.label)} - job.membership.contribution.suspects
    absent |= without - present
    suspect(job, op, absent, ("results",), "published no result for", "its rows count as zero until others own them")
