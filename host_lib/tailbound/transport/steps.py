"""Where this rank stands among the others: in step, behind, or lost (clock-20). Pure, labels only.

A rank that was stopped finds itself behind: its transport has averaged and published for it as long as the ring lasted.
Within the ring it catches up from memory; beyond it, it is lost and has to jump. The ring begins with the own next op
and takes nothing that lies beyond it. A step that is larger than the ring passes through it op by op: who is in step
loses nothing by that, but who is a whole step behind cannot have all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tailbound.wire.schema import OP_INDEX_BITS, OP_STEPS

#: Step numbers wrap here.
STEP_MASK = 0xFFFFFFFF >> OP_INDEX_BITS
_HALF = (STEP_MASK + 1) >> 1
#: What is kept for longer than this many steps is dated this far back, since a step of half of all steps ago would seem
#: to be one that is still to come. Nothing that is in flight is as old.
OLD = 1 << 16


def step_of(label: int) -> int:
    """The step of an op label."""
    return label >> OP_INDEX_BITS


def index_of(label: int) -> int:
    """The place of an op in its step."""
    return label & (1 << OP_INDEX_BITS) - 1


def label_text(label: int) -> str:
    """An op label as people read it, everywhere: step.index."""
    return f"{step_of(label)}.{index_of(label)}"


def step_distance(a: int, b: int) -> int:
    """Signed distance ``a - b`` of two step numbers (22 bits, serial)."""
    return ((a - b + _HALF) & STEP_MASK) - _HALF


class Steps(NamedTuple):
    """The own next op beside the newest one that a live peer has named.

    Attributes:
        label: of the own next op.
        newest: label of the newest one that a live peer has named; an older one than the own says nothing.
        op_rows: rows of the ops of a step; none while they are not known.
        ring_rows: rows of the result ring: as many are kept, counted from the own next op on.
    """

    label: int
    newest: int
    op_rows: Sequence[int]
    ring_rows: int

    @property
    def own(self) -> int:
        """Step of the own next op."""
        return step_of(self.label)

    @property
    def behind(self) -> int:
        """Steps by which the newest live peer is ahead; 0 in step."""
        return max(0, step_distance(step_of(self.newest), self.own))

    @property
    def lost(self) -> bool:
        """Whether this rank is behind by more than the ring takes (than op records last, while no step is known)."""
        if self.behind == 0 or not self.op_rows:
            return self.behind >= OP_STEPS
        begun, named = index_of(self.label), index_of(self.newest)
        rows = self.behind * sum(self.op_rows) - sum(self.op_rows[:begun]) + sum(self.op_rows[: named + 1])
        return rows > self.ring_rows
