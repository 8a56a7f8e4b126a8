"""Counting over slot records, presence and result records (``host_lib/core/rows.c``)."""

from __future__ import annotations

import numpy as np
import pytest

from op_world import COOKIE, OpWorld, launched
from tailbound.codec.shape import GROUP_ROWS
from tailbound.collective.op import Op
from tailbound.collective.tally import counts, flags_by, gather, point_own, read_records, summed_by
from tailbound.transport.sequence import OwnerMap, Sequence
from tailbound.wire.schema import EXPONENT_NONE, Flag

#: Rows of either ring; an op that begins with this one goes round it.
RING, LAST = 64, 62


def world_of(ranks: int, owners: tuple[int, ...]) -> tuple[OpWorld, Op]:
    """Rank 0 with an op of a group of rows, which ``owners`` own; it goes round both rings."""
    op = launched(Sequence(ranks, OwnerMap(0, owners)), ranks, entries=64 * GROUP_ROWS)
    op.sum_seq = op.result_seq = LAST
    return OpWorld(ranks, RING), op


def test_contributions_are_counted_of_this_op_alone() -> None:
    world, op = world_of(70, (0,))
    slots, label, op.own = world.store.slots, op.label, 5
    here = {62: (label, COOKIE, [1, 69]), 63: (label, COOKIE, [1]), 0: (label + 1, COOKIE, [1, 2]),
            1: (label, COOKIE + 1, [2]), 2: (label, COOKIE, [63]), 14: (label, COOKIE, [3])}  # fmt: skip
    for at, (of, cookie, ranks) in here.items():
        slots[at]["op"], slots[at]["cookie"] = of, cookie
        for rank in ranks:
            slots[at]["ranks"][rank >> 6] |= np.uint64(1 << (rank & 63))
    found = summed_by(world.known, op)
    assert len(found) == 70
    assert {rank: count for rank, count in enumerate(found) if count} == {1: 2, 63: 1, 69: 1}


def test_results_are_found_in_the_ring_and_the_own_among_the_own() -> None:
    world, op = world_of(3, (0, 1, 2))
    presence, placement, source = world.store.presence, op.place.placement, op.buffers.source
    owner, own = placement.owner.tolist(), placement.rows_of(0).tolist()
    others = [row for row in range(GROUP_ROWS) if owner[row] != 0]
    wrong = dict(zip(others, [(op.label + 1, COOKIE), (op.label, COOKIE + 1)], strict=False))
    for row in range(GROUP_ROWS):
        presence[(LAST + row) % RING] = wrong.get(row, (op.label, COOKIE))
    op.buffers.results.usable[:] = 1
    op.buffers.results.usable[2] = 0
    op.buffers.results.scale[:] = range(1, len(own) + 1)
    by_owner, here = counts(world.known), [row for row in others if row not in wrong]
    assert gather(world.known, op, by_owner) == len(here)
    point_own(world.known, op)
    assert list(by_owner) == [0, *(sum(owner[row] == rank for row in here) for rank in (1, 2))]
    assert source[others].tolist() == [(LAST + row) % RING if row in here else -1 for row in others]
    assert source[own].tolist() == [-1 if place == 2 else -2 - place for place in range(len(own))]
    assert op.buffers.row_scale[own].tolist() == list(range(1, len(own) + 1))


@pytest.mark.parametrize(
    ("form", "flags", "count", "kept"),
    [
        (0, 0, 3, True),
        (0, Flag.SKIP, 4, True),
        (0, 0, 0, False),  # no contributor
        (0, 0, 5, False),  # more than there are ranks
        (0, Flag.SWITCHED, 3, False),
        (Flag.SUMS, Flag.SUMS, 4, True),
        (Flag.SUMS, Flag.SWITCHED, 4, False),
        (Flag.SWITCHED, 0, 4, False),
        (Flag.SWITCHED, Flag.SWITCHED | Flag.STOP, 1, True),
    ],
)
@pytest.mark.parametrize("overwritten", [False, True])
def test_a_record_that_is_not_as_it_should_be_is_taken_out(
    form: Flag, flags: Flag, count: int, kept: bool, overwritten: bool
) -> None:
    """Rules: kernel-20, clock-28."""
    world, op = world_of(4, (1,))
    b, record = op.buffers, world.store.result_records[9]
    b.source[:], b.row_scale[:], b.row_exponent[:], b.row_count[:] = -2, 7, 42, 9
    b.source[:2] = -1, 9
    record["op"], record["count"], record["flags"] = op.label + 1024 * overwritten, count, flags
    record["scale"], record["exponent"] = np.float32(0.5), -12
    here = kept and not overwritten
    assert read_records(world.known, op, int(form)) == (not here)
    assert b.source[:3].tolist() == [-1, 9 if here else -1, -2]
    assert b.row_scale[:3].tolist() == [7, 0.5 if here else 7, 7]
    # of ranks they say nothing
    assert b.row_count[:3].tolist() == ([0, count * here, 9] if form else [9] * 3)
    assert b.row_exponent[:3].tolist() == ([EXPONENT_NONE, -12 if here else EXPONENT_NONE, 42] if form else [42] * 3)
    assert flags_by(world.known, op) == [-1, int(flags) if here else -1, -1, -1]


def test_flags_are_those_of_all_rows_of_an_owner() -> None:
    world, op = world_of(3, (1, 2))
    records, of = world.store.result_records, [np.flatnonzero(op.place.placement.owner == rank) for rank in range(3)]
    op.buffers.source[:] = range(GROUP_ROWS)
    records["op"], records["flags"] = op.label, Flag.SKIP
    records["flags"][of[1][1]] = Flag.QUORUM
    records["flags"][of[2][0]], records["op"][of[2][0]] = Flag.STOP, op.label + 1
    assert flags_by(world.known, op) == [-1, int(Flag.SKIP | Flag.QUORUM), int(Flag.SKIP)]
