"""Counting over slot records, presence and result records (``host_lib/core/rows.c``)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from op_world import COOKIE, OpWorld, launched
from tailbound.codec.shape import GROUP_ROWS
from tailbound.collective.accounting import Tally
from tailbound.collective.op import Flow, Op
from tailbound.kernel.core import core
from tailbound.observe.ledger import Ledger
from tailbound.transport.sequence import OwnerMap, Sequence
from tailbound.wire.ranks import mark, ranks_of
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
    found = world.known.summed(op)
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
    by_owner, here = (ctypes.c_int64 * 3)(), [row for row in others if row not in wrong]
    terms, at = world.terms.pointer, ctypes.addressof(op)
    assert core().fast.tb_gather(terms, at, by_owner) == len(here)
    core().fast.tb_point_own(terms, at)
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
    assert core().fast.tb_read(world.terms.pointer, ctypes.addressof(op), form) == (not here)
    assert b.source[:3].tolist() == [-1, 9 if here else -1, -2]
    assert b.row_scale[:3].tolist() == [7, 0.5 if here else 7, 7]
    # of ranks they say nothing
    assert b.row_count[:3].tolist() == ([0, count * here, 9] if form else [9] * 3)
    assert b.row_exponent[:3].tolist() == ([EXPONENT_NONE, -12 if here else EXPONENT_NONE, 42] if form else [42] * 3)
    assert account(world, op, [0] * 4, results=True)[0].flags == (int(flags) if here else 0)


def account(
    world: OpWorld, op: Op, came: list[int], *, results: bool, abstains: bool = False, ledger: Ledger | None = None
) -> tuple[Any, Any]:
    """What a half of an op came to, and the ledger's lines of it by rank."""
    tally, ledger = Tally(), ledger or Ledger(world.known.world)
    world.known.follow()
    core().fast.tb_account(
        world.terms.pointer, ctypes.addressof(op), results, abstains, (ctypes.c_int64 * len(came))(*came),
        ctypes.addressof(ledger.lines), ctypes.addressof(tally),
    )  # fmt: skip
    return tally, ledger.lines[results]


def test_flags_are_those_of_all_rows_of_an_owner() -> None:
    world, op = world_of(4, (1, 2, 3))
    records, of = world.store.result_records, [np.flatnonzero(op.place.placement.owner == rank) for rank in range(4)]
    op.buffers.source[:] = range(GROUP_ROWS)
    op.buffers.source[of[3]] = -1
    records["op"], records["flags"] = op.label, Flag.SKIP
    records["flags"][of[1][1]] = Flag.QUORUM
    records["flags"][of[2][0]], records["op"][of[2][0]] = Flag.STOP, op.label + 1
    tally, _ = account(world, op, [0] * 4, results=True)
    assert (tally.flags, tally.owners, tally.well) == (Flag.SKIP | Flag.QUORUM, 2, 1)


#: Rank 0 of 5 owns 10 rows: what came of ranks 1 to 4; then ranks that have sent all, that abstain, that
#: stay out, that are suspects, and that have left; and rows due and come, the same of those that are judged, and ranks
#: of which nothing came.
_FIRST = [
    ([10, 10, 10, 10], "1234", "", "", "", "", (40, 40), (40, 40), ""),
    ([10, 9, 0, 0], "12", "", "", "", "", (40, 19), (20, 19), "34"),
    ([10, 9, 0, 0], "123", "", "", "", "", (40, 19), (30, 19), "34"),
    ([10, 9, 0, 0], "1234", "3", "4", "", "", (30, 19), (20, 19), "4"),
    ([10, 0, 0, 3], "1234", "", "", "23", "", (40, 13), (20, 13), "23"),
    ([10, 0, 0, 3], "12", "", "", "", "23", (20, 13), (20, 13), ""),
]


@pytest.mark.parametrize(
    ("came", "sent", "abstained", "stayed", "suspects", "gone", "due", "judged", "absent"), _FIRST
)  # fmt: skip
def test_what_the_first_half_came_to(
    came: list[int], sent: str, abstained: str, stayed: str, suspects: str, gone: str, due: tuple[int, int],
    judged: tuple[int, int], absent: str,
) -> None:  # fmt: skip
    """Rules: clock-14, clock-15, clock-24."""
    world, op = world_of(5, (0,))
    op.own = 10
    world.marks("contributed", op.label, {*map(int, sent)})
    for ranks, words in ((abstained, op.abstained), (stayed, op.stayed)):
        for rank in map(int, ranks):
            mark(words, rank)
    for rank in map(int, suspects):
        world.known.membership.contribution.accuse(rank, op.label)
    for rank in map(int, gone):
        world.known.membership.bye(rank, op.label)
    tally, lines = account(world, op, [0, *came], results=False)
    assert (tally.due, tally.came) == due
    assert (tally.judged, tally.judged_came) == judged
    assert ranks_of(tally.absent) == {*map(int, absent)}
    for rank in range(1, 5):
        line, entered = lines[rank], str(rank) not in abstained + gone
        missing = entered * (10 - came[rank - 1])
        through = str(rank) in sent and str(rank) not in stayed
        assert (line.ops, line.expected) == (entered, 10 * entered)
        assert (line.gaps, line.open) == ((missing, 0) if through else (0, missing))


@pytest.mark.parametrize(
    ("came", "present", "abstains", "abstained", "quorum"),
    [
        ([9, 1, 0, 0], True, False, "", True),
        ([9, 1, 0, 0], False, False, "", False),
        ([9, 1, 0, 0], False, True, "", True),
        ([9, 0, 0, 0], True, False, "", False),
        ([9, 0, 0, 0], True, False, "4", True),
    ],
)
def test_who_has_part_in_an_op_makes_its_quorum(
    came: list[int], present: bool, abstains: bool, abstained: str, quorum: bool
) -> None:
    """Rules: clock-38."""
    world, op = world_of(5, (0,))
    op.own, op.own_in = 10, int(present)
    for rank in map(int, abstained):
        mark(op.abstained, rank)
    assert account(world, op, [0, *came], results=False, abstains=abstains)[0].quorum == quorum


def test_results_are_due_of_owners_alone() -> None:
    world, op = world_of(4, (0, 1, 2))
    shares = op.place.placement.shares
    world.marks("published", op.label, {1})
    tally, lines = account(world, op, [0, 0, 5, 0], results=True)
    assert (tally.due, tally.came) == (shares[1] + shares[2], 5)
    assert (tally.judged, tally.judged_came, ranks_of(tally.absent)) == (tally.due, 5, {1})
    assert [(line.ops, line.gaps, line.open) for line in lines] == [
        (0, 0, 0), (1, shares[1], 0), (1, 0, shares[2] - 5), (0, 0, 0)
    ]  # fmt: skip


def test_a_rank_is_told_when_ops_running_lack_most_of_what_it_sent() -> None:
    """What had to be requested came, and counts as lacking; an op of which it has not sent all says nothing."""
    world, op = world_of(3, (0,))
    op.own = 10
    told, ledger, flows = [], Ledger(3), (Flow * 3)()  # type: ignore[operator]
    half, flow = op.first, flows[0]  # the next rank is first
    half.terms, half.flows, half.count = world.terms.pointer, ctypes.addressof(flows), 3
    for came, sent, again in [(10, True, 6), (4, True, 0), (10, False, 0), (4, True, 0), (5, True, 0), (4, True, 0)]:
        world.marks("contributed", op.label, {1, 2} if sent else {2})
        flow.again = half.requested = again
        tally, _ = account(world, op, [0, came, 10], results=False, ledger=ledger)
        told.append(ranks_of(tally.lacking))
    assert told == [set(), {1}, set(), {1}, set(), set()]
