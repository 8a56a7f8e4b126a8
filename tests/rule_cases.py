"""Rules that take several packets to see, for both datapaths: what becomes of rows and op records."""

from __future__ import annotations

from typing import Any

import cases
from cases import OP, contribution, ready, result
from tailbound.wire.schema import OP_STEPS, Verdict, op_label, op_slot


def check_far_label(world: Any) -> None:
    """A label from far ahead costs nobody anything, wherever its record would stand; that it was heard is known."""
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


def check_stopped(world: Any, newest_first: bool) -> None:
    """A rank stopped for 30 steps of four rows: all results that its ring holds are there, and its own op's record."""
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
