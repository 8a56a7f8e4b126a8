"""What a rank knows of one op at one moment. Everything here reads, nothing changes anything but scratch memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.hashing import seed_of
from tailbound.collective.job import Job
from tailbound.collective.op import Op
from tailbound.collective.repair import REPEATS, REPEATS_COLD, Places, Round, asked_most, patience
from tailbound.collective.tally import gather_results, rows_by_rank
from tailbound.collective.timing import flow_bytes, heard


class View:
    """One op as this rank sees it, from the kernel's record, the marks of all and what the job has learned.

    Attributes:
        record: the kernel's own record of the op, which goes on changing; None while no packet has named the op.
        own: rows that this rank owns.
        progress: rows of either half that have been taken.
    """

    def __init__(self, job: Job, op: Op) -> None:
        self.job, self.op = job, op
        self.record = job.record(op.label)
        self.own = int(op.place.placement.counts[job.rank])

    # -- the own rows ---------------------------------------------------------------------------------------------

    def known_scales(self) -> bool:
        """Whether the op can carry on its bucket's scales."""
        return self.op.key in self.job.exponents

    def foreseen_wrongly(self) -> bool:
        """Whether packets of the op have another layout than this rank takes it to have."""
        return self.record is not None and int(self.record["layout"]) != self.op.place.layout.tag

    # -- marks ----------------------------------------------------------------------------------------------------

    def contributed(self, rank: int) -> bool:
        """Whether ``rank`` has sent its contributions in full."""
        return self.job.contributed(rank, self.op.label)

    def published(self, rank: int) -> bool:
        """Whether ``rank`` has sent its results in full."""
        return self.job.published(rank, self.op.label)

    def brings_no_more(self, rank: int) -> bool:
        """Whether no contribution of ``rank`` is to be expected any more."""
        return rank in self.op.abstainers or self.contributed(rank)

    # -- time -----------------------------------------------------------------------------------------------------

    def first_deadline(self) -> int:
        """How long after its start the first half may last, ns (clock-6)."""
        if self.op.cold:  # until scales are agreed on, it has the whole stage (clock-26)
            return self.job.config.stage_max
        job, step = self.job, self.op.place.step
        return job.deadlines.applied(flow_bytes(self.op), heard(job, job.membership.live, step))

    def second_deadline(self) -> int:
        """How long after the start of the first half the second may last, ns: all owners' D1 lie inside (clock-11)."""
        job, op, size = self.job, self.op, flow_bytes(self.op)
        most = 2 * job.config.stage_max
        if op.cold:
            return most
        length = job.deadlines.receiver(size, heard(job, job.membership.owners, op.place.step))
        if op.launch is not None:
            length = job.deadlines.hurried(length, size, op.start - op.admitted)
        return min(length, most)

    # -- rows -----------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> int:
        """Rows of both halves that have been taken."""
        return int(self.record["progress"]) + int(self.record["results_in"]) if self.record is not None else 0

    def summed(self) -> NDArray[np.int64]:
        """Own rows that hold a contribution, by rank (i64[ranks])."""
        job, place = self.job, self.op.place
        out = np.zeros(job.ranks, np.int64)
        rows_by_rank(job.slots, place.sum_seqs[job.rank], self.own, job.sum_mask, job.cookie, place.label, out)
        return out

    def unsummed(self, rank: int) -> Places:
        """Places of the own rows that lack the contribution of ``rank``."""
        job, place = self.job, self.op.place
        slots = job.slots[(place.sum_seqs[job.rank] + np.arange(self.own)) & job.sum_mask]
        here = (slots["cookie"] == job.cookie) & (slots["op"] == place.label)
        here &= (slots["ranks"][:, rank >> 6] >> np.uint64(rank & 63) & np.uint64(1)).astype(bool)
        return np.flatnonzero(~here)

    def gather(self, by_owner: NDArray[np.int64] | None = None) -> int:
        """Notes in ``op.buffers.source`` which results are here; returns how many.

        Args:
            by_owner: i64[world], written: how many of whom.
        """
        job, place, source = self.job, self.op.place, self.op.buffers.source
        counts = np.zeros(job.world, np.int64) if by_owner is None else by_owner
        owner, seq = place.placement.owner, place.result_seq
        return int(gather_results(job.presence, seq, job.cookie, place.label, owner, job.rank, source, counts))

    def unrepaired(self, rank: int) -> Places:
        """Places in the list of ``rank`` of the results that were not here when ``gather`` was called last."""
        return np.flatnonzero(self.op.buffers.source[self.op.place.placement.rows_of(rank)] == -1)

    def round(self, rows: int) -> Round:
        """A repair that may ask for a part of ``rows``."""
        job, op = self.job, self.op
        cold = op.cold or job.repairs.warming(op.key)
        seed = seed_of(job.cookie, op.label) ^ job.rank
        longest = patience(job.deadlines.stage_two(flow_bytes(op)))
        repeats = REPEATS_COLD if cold else REPEATS
        return Round(int(seed), asked_most(rows, cold=cold), repeats, longest, job.repairs.answers)
