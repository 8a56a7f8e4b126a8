"""Rules that take several packets to see, for both datapaths: what becomes of sums, rows and op records."""

from __future__ import annotations

from typing import Any

import numpy as np

import cases
from cases import OP, contribution, ready, result
from tailbound.wire.schema import OP_STEPS, Verdict, op_label, op_slot

SLOT = cases.SEQ & (cases.SUM_ROWS - 1)


def check_exponent(world: Any) -> None:
    """Rank 1 has a scale of long ago and comes first; the host then says which is right; 2 and 3 have that.

    Rules: kernel-16, kernel-21.
    """
    stale = contribution(1, exponent=3, rows=1, row=0)
    assert world.take(stale) == (Verdict.STORED, 1)
    world.store.expect[SLOT] = (OP, cases.EXPONENT, 1)
    assert world.take(contribution(2, rows=1, row=0)) == (Verdict.STORED, 2)
    assert world.abandoned == (1,)
    assert world.take(contribution(3, rows=1, row=0, need=7)) == (Verdict.ADDED, 3)
    assert world.take(stale) == (Verdict.SCALE_MISMATCH, 1)
    want = sum(np.frombuffer(contribution(r, rows=1, row=0)[64:], np.uint8).astype(np.uint16) for r in (2, 3))
    assert np.array_equal(world.lanes(SLOT, cases.CODES), want)
    record = world.store.slots[SLOT]
    assert record["ranks"].tolist() == [0b1100, 0, 0, 0]
    assert (record["count"], record["units"], record["need"], record["exponent"]) == (2, 2, 7, cases.EXPONENT)
    counts = world.ledger().sum(0)
    assert counts[Verdict.STORED] + counts[Verdict.ADDED] - counts[Verdict.ABANDONED] == record["count"]


def check_complete_again(world: Any) -> None:
    """A row of three wrong contributions counts as complete no longer, and does again when three right ones are in.

    Rule: kernel-16.
    """
    op = world.store.ops[op_slot(OP)]
    for rank in (1, 2, 3):
        world.take(contribution(rank, rows=1, row=0, exponent=3))
    assert op["rows_complete"] == 1
    world.store.expect[SLOT] = (OP, cases.EXPONENT, 1)
    seen = []
    for rank in (3, 1, 2):
        assert world.take(contribution(rank, rows=1, row=0))[0] == (Verdict.STORED if rank == 3 else Verdict.ADDED)
        seen.append(int(op["rows_complete"]))
    assert seen == [0, 0, 1]
    assert world.store.slots[SLOT]["count"] == 3


def check_counted_once(world: Any) -> None:
    """Each row counts as complete once, whoever leaves the live set and comes back; stored over, it counts no longer.

    Rule: kernel-16.
    """
    op = world.store.ops[op_slot(OP)]

    def give(row: int, rank: int, exponent: int = cases.EXPONENT) -> int:
        packet = contribution(rank, rows=3, row=row, seq=cases.SEQ + row, exponent=exponent)
        assert world.take(packet)[0] in (Verdict.STORED, Verdict.ADDED)
        return int(op["rows_complete"])

    def live(ranks: int) -> None:
        world.control(live=[ranks, 0, 0, 0], live_peers=ranks.bit_count(), need=ranks.bit_count() // 2 + 1)

    live(0b1110)
    assert [give(0, rank) for rank in (1, 2, 3)] == [0, 0, 1]
    # two with a stale scale are not counted, and nothing is taken off for them when rank 3, which they lacked, is out
    assert [give(1, rank, 3) for rank in (1, 2)] == [1, 1]
    live(0b0110)
    world.store.expect[SLOT + 1] = (OP, cases.EXPONENT, 1)
    assert [give(1, rank) for rank in (1, 2)] == [1, 2]
    # what rank 3 adds counts nothing twice, neither before it is back nor then
    assert give(1, 3) == 2
    assert [give(2, rank) for rank in (1, 2)] == [2, 3]
    live(0b1110)
    assert give(2, 3) == 3
    # a sum that was counted and is stored over counts no longer, whatever is live now
    world.store.expect[SLOT + 2] = (OP, 5, 1)
    assert [give(2, rank, 5) for rank in (1, 2, 3)] == [2, 2, 3]


def check_far_label(world: Any) -> None:
    """A label from far ahead costs nobody anything, wherever its record would stand; that it was heard is known.

    Rules: kernel-12, kernel-14.
    """
    assert world.take(contribution(2)) == (Verdict.STORED, 2)
    record = world.store.ops[op_slot(OP)].tobytes()
    for step in range(3 + OP_STEPS, 4008, 5):
        assert world.take(ready(1, op=op_label(step, 1))) == (Verdict.FUTURE_RESULT, 1)
        assert world.take(contribution(1, op=op_label(step, 1))) == (Verdict.FUTURE_OP, 1)
    assert world.store.ops[op_slot(OP)].tobytes() == record
    assert world.store.peer_states[1]["newest"] == op_label(step, 1)
    assert world.take(contribution(1)) == (Verdict.ADDED, 1)
    assert world.take(ready(3)) == (Verdict.CONTROL_PASSED, 3)
    assert world.take(result(3)) == (Verdict.RESULT_TAKEN, 3)


def check_stopped_newest_first(world: Any) -> None:
    """As ``check_stopped``."""
    check_stopped(world, newest_first=True)


def check_stopped(world: Any, newest_first: bool = False) -> None:
    """A rank stopped for 30 steps of four rows: all results that its ring holds are there, and its own op's record.

    Rules: kernel-14, kernel-17.
    """
    assert world.take(ready(1, op=op_label(3, 1))) == (Verdict.CONTROL_PASSED, 1)
    steps = list(range(30))
    for i in reversed(steps) if newest_first else steps:
        for row in range(4):
            seq = cases.RESULT_BASE + 4 * i + row
            packet = result(2, 16, op=op_label(3 + i, 1), seq=seq, row=row, rows=4)
            assert world.take(packet) == (Verdict.RESULT_TAKEN, 2), (i, row)
    for i in steps:
        for row in range(4):
            here = world.store.presence[(cases.RESULT_BASE + 4 * i + row) & (cases.RESULT_ROWS - 1)]
            assert (here["op"], here["cookie"]) == (op_label(3 + i, 1), cases.COOKIE), (i, row)
    for i in range(OP_STEPS):
        record = world.store.ops[op_slot(op_label(3 + i, 1))]
        assert (record["op"], record["results_in"]) == (op_label(3 + i, 1), 4), i


CHECKS = [
    check_exponent,
    check_complete_again,
    check_counted_once,
    check_far_label,
    check_stopped,
    check_stopped_newest_first,
]
