"""Where this rank stands among the others: in step, behind, or lost (clock-20). Pure state, labels only.

A rank that was stopped finds itself behind: its transport has averaged and published for it as long as the ring lasted.
Within the ring it catches up from memory; beyond it, it is lost and has to jump. The ring begins with the own next op
and takes nothing that lies beyond it. A step that is larger than the ring passes through it op by op: who is in step
loses nothing by that, but who is a whole step behind cannot have all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tailbound.wire.schema import OP_INDEX_BITS, OP_STEPS, serial_distance

#: Step numbers wrap here.
STEP_MASK = 0xFFFFFFFF >> OP_INDEX_BITS
_INDEX_MASK = (1 << OP_INDEX_BITS) - 1


def step_of(label: int) -> int:
    """The step of an op label."""
    return label >> OP_INDEX_BITS


def label_text(label: int) -> str:
    """An op label as people read it, everywhere: step.index."""
    return f"{label >> OP_INDEX_BITS}.{label & (1 << OP_INDEX_BITS) - 1}"


def step_distance(a: int, b: int) -> int:
    """Signed distance ``a - b`` of two step numbers (22 bits, serial)."""
    half = (STEP_MASK + 1) >> 1
    return ((a - b + half) & STEP_MASK) - half


class Steps:
    """Compares the own next op with the newest ones that live peers have named.

    Args:
        ring_rows: rows of the result ring: as many are kept, counted from the own next op on.
    """

    def __init__(self, ring_rows: int) -> None:
        self._ring_rows = ring_rows
        self._own = self._newest = 0
        self._op_rows: Sequence[int] = ()

    def look(self, own: int, newest: Iterable[int], op_rows: Sequence[int]) -> None:
        """Takes the labels of the own next op and of live peers' newest ones, and the rows of a step's ops if known."""
        self._own, self._op_rows, found = own, op_rows, own
        for label in newest:
            if serial_distance(label, found) > 0:
                found = label
        self._newest = found

    @property
    def own(self) -> int:
        """Step of the own next op."""
        return step_of(self._own)

    @property
    def newest(self) -> int:
        """Newest step that a live peer has named, at least the own one."""
        return step_of(self._newest)

    @property
    def behind(self) -> int:
        """Steps by which the newest live peer is ahead; 0 in step."""
        return max(0, step_distance(self.newest, self.own))

    @property
    def in_step(self) -> bool:
        """Whether no live peer is in a newer step; only then a rank suspects others and learns (clock-5, clock-14)."""
        return self.behind == 0

    @property
    def lost(self) -> bool:
        """Whether this rank is behind by more than the ring takes (than op records last, while no step is known)."""
        if self.behind == 0 or not self._op_rows:
            return self.behind >= OP_STEPS
        begun, named = self._own & _INDEX_MASK, self._newest & _INDEX_MASK
        rows = self.behind * sum(self._op_rows) - sum(self._op_rows[:begun]) + sum(self._op_rows[: named + 1])
        return rows > self._ring_rows
