"""Ops whose rows the ranks own: what their results come to.

Contributions and results are repaired in every op (clock-23). A missing contribution costs its row one contributor,
which the mean allows for, and a missing result costs every replica; but both are asked for while others are still
sending, as a rule, so that a row that was lost costs no op its time.
"""

from __future__ import annotations

from tailbound.collective.job import Job
from tailbound.collective.op import Op
from tailbound.collective.timing import cut_off, suspect
from tailbound.wire.ranks import ranks_of
from tailbound.wire.schema import Stage, Why


def note(job: Job, op: Op) -> None:
    """Notes how many results are there and who was missing, at the end of an op."""
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
    _suspect(job, op, ranks_of(op.buffers.tally[Stage.RESULTS].absent))
    if op.second.why == Why.DEADLINE:
        came, counts = op.buffers.came[Stage.RESULTS], place.placement.shares
        through = job.records.all_published(job.membership.owners, op.label)
        flows = [(came[p], counts[p]) for p in {*job.membership.owners} - {*through}]
        cut_off(job, op, op.second, op.second.over - (op.closed_at or op.start), flows)


def _suspect(job: Job, op: Op, absent: set[int]) -> None:
    """Suspects owners of which nothing came; an op in which a rank owns no rows does not clear it."""
    op.outcome.missing |= absent
    placement = op.place.placement
    without = {p for p in job.peers if not placement.shares[p]} if 0 in placement.shares else set[int]()
    # who was left out of the map is present by its contributions, since it has no results to publish
    left_out = without.difference(placement.owner_map.owners)
    without -= {*job.records.all_contributed(left_out, op.label)} - job.membership.contribution.suspects
    then = "its rows count as zero until others own them"
    suspect(job, op, absent, (job.membership.result,), "published no result for", then, without)
