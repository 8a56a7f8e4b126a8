"""A state in the words of the rules: what invariants and the host's moves read of it."""

from __future__ import annotations

from functools import cached_property

import cases
from interleave.scene import CODES, OPS, SENDERS, A, Op
from interleave.tables import Layout
from tailbound.wire.schema import OP_INDEX_BITS, OP_STEPS

#: What only rises in the record of one op, and among a sender's marks.
RISING = ("results_in",)
SETS = ("heard", "tail_contributed", "tail_published", "abstained", "begun")
MARKS = ("contributed", "published", "newest", "map_known")


class View:
    """Named parts of a state; labels and sequences of a scene never wrap, so they compare as integers."""

    def __init__(self, layout: Layout, state: bytes) -> None:
        self.state = state
        self._layout = layout

    def get(self, name: str) -> int:
        return self._layout.get(self.state, name)

    def part(self, name: str, size: int) -> bytes:
        return self._layout.part(self.state, name, size)

    @cached_property
    def released(self) -> int:
        return self.get("control.released")

    @cached_property
    def sum_base(self) -> int:
        return self.get("control.sum_base")

    @cached_property
    def result_base(self) -> int:
        return self.get("control.result_base")

    @cached_property
    def live(self) -> int:
        return self.get("control.live")

    @cached_property
    def map_id(self) -> int:
        return self.get("control.map_id")

    @cached_property
    def sealed(self) -> int:
        return self.get("slot_locks.sealed_op")

    @cached_property
    def expected_results(self) -> int:
        return self.get("expect_results.op")

    @cached_property
    def slot(self) -> int:
        """The op of the sum; 0 where there never was one."""
        return self.get("slots.op")

    @cached_property
    def ranks(self) -> int:
        return self.get("slots.ranks")

    @cached_property
    def result(self) -> int:
        return self.get("result_records.op")

    @cached_property
    def record(self) -> int:
        return self.get("ops.op")

    def window(self, op: Op) -> bool:
        """Whether the op's row lies in the window of sums."""
        return self.sum_base <= op.seq < self.sum_base + cases.SUM_ROWS

    def result_window(self, op: Op) -> bool:
        """Whether the op's row lies in the window of results."""
        return self.result_base <= op.result_seq < self.result_base + cases.RESULT_ROWS

    def in_reach(self, op: Op) -> bool:
        """Whether records reach as far as the op."""
        return op.label - self.released <= OP_STEPS << OP_INDEX_BITS

    def map_of(self, op: Op) -> int:
        """The owner map of the op's time."""
        return self.map_id if op.label >= self.get("control.map_since") else self.get("control.map_before")


assert OPS[A.label] is A
assert CODES % 8 == 0
assert SENDERS[0] == 1
