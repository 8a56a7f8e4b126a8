"""What a rank knows of one op at one moment. Everything here reads, nothing changes anything but scratch memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import Places
from tailbound.collective.known import Known
from tailbound.collective.op import Op
from tailbound.collective.tally import gather_flags, gather_results, rows_by_rank


class View:
    """One op as this rank sees it, from the kernel's record, the marks of all and what the job has learned.

    Attributes:
        known: what the rank knows beside the op.
        record: the kernel's own record of the op, which goes on changing; None while no packet has named the op.
        own: rows that this rank owns.
    """

    def __init__(self, known: Known, op: Op) -> None:
        self.known, self.op = known, op
        self.record = known.records.at(op.slot, op.label)
        self.own = op.place.placement.shares[known.rank]

    # -- the own rows ---------------------------------------------------------------------------------------------

    # -- marks ----------------------------------------------------------------------------------------------------

    def contributed(self, rank: int) -> bool:
        """Whether ``rank`` has sent its contributions in full."""
        return self.known.records.contributed(rank, self.op.label)

    def published(self, rank: int) -> bool:
        """Whether ``rank`` has sent its results in full."""
        return self.known.records.published(rank, self.op.label)

    def brings_no_more(self, rank: int) -> bool:
        """Whether no contribution of ``rank`` is to be expected any more."""
        return rank in self.op.abstainers or self.contributed(rank)

    def owners(self) -> list[int]:
        """Live ranks, but the own one, that own rows of the op."""
        counts = self.op.place.placement.shares
        return [p for p in self.known.membership.owners if counts[p]]

    # -- time -----------------------------------------------------------------------------------------------------

    def first_deadline(self) -> int:
        """How long after its start the first half may last, ns (clock-6)."""
        if self.op.cold:  # until scales are agreed on, it has the whole stage (clock-26)
            return self.known.config.stage_max
        known, op = self.known, self.op
        return known.deadlines.applied(op.flow_bytes, known.records.deadlines(known.membership.live, op.place.step))

    def second_deadline(self) -> int:
        """How long after the start of the first half the second may last, ns: all owners' D1 lie inside (clock-11)."""
        known, op, size = self.known, self.op, self.op.flow_bytes
        most = 2 * known.config.stage_max
        if op.cold:
            return most
        length = known.deadlines.receiver(size, known.records.deadlines(known.membership.owners, op.place.step))
        if op.launch is not None:
            length = known.deadlines.hurried(length, size, op.start - op.admitted)
        return min(length, most)

    # -- rows -----------------------------------------------------------------------------------------------------

    def summed(self) -> list[int]:
        """Own rows that hold a contribution, by rank."""
        known, records, seq = self.known, self.known.records, self.op.place.sum_seqs[self.known.rank]
        out = np.zeros(known.ranks, np.int64)
        rows_by_rank(records.slots, seq, self.own, records.sum_mask, known.cookie, self.op.label, out)
        counts: list[int] = out.tolist()
        return counts

    def unsummed(self, rank: int) -> Places:
        """Places of the own rows that lack the contribution of ``rank``."""
        known, records, seq = self.known, self.known.records, self.op.place.sum_seqs[self.known.rank]
        slots, at = records.slots, (seq + np.arange(self.own)) & records.sum_mask
        here = (slots["cookie"][at] == known.cookie) & (slots["op"][at] == self.op.label)
        here &= (slots["ranks"][at, rank >> 6] >> np.uint64(rank & 63) & np.uint64(1)).astype(bool)
        return np.flatnonzero(~here)

    def gather(self, by_owner: NDArray[np.int64] | None = None) -> int:
        """Notes in ``op.buffers.source`` which results are here; returns how many.

        Args:
            by_owner: i64[world], written: how many of whom.
        """
        known, place, source = self.known, self.op.place, self.op.buffers.source
        counts = np.zeros(known.world, np.int64) if by_owner is None else by_owner
        owner, seq, presence = place.placement.owner, place.result_seq, known.records.presence
        return int(gather_results(presence, seq, known.cookie, place.label, owner, known.rank, source, counts))

    def flags(self) -> list[int]:
        """By rank, the header flags of its results that ``gather`` has found; -1: there are none."""
        known, op = self.known, self.op
        found = np.empty(known.world, np.int64)
        gather_flags(known.records.results, op.buffers.source, op.label, op.place.placement.owner, found)
        flags: list[int] = found.tolist()
        return flags
