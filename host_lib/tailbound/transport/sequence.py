"""Op labels, layouts and row sequences: where every op's rows lie in everybody's rings, by counting alone.

A rank numbers its ops (step, index) in launch order and adds up their rows, for every owner and in all. Ranks with the
same history therefore agree on every row sequence without a word; ranks with another history are told apart by the
layout tag. From the second step with an equal layout on, the ops of the next step can be told in advance, so that the
transport of a rank that is still in its backward pass can average and publish for the others (CLOCKS.md rule 2).
"""

from __future__ import annotations

from dataclasses import dataclass

from tailbound.codec.owners import OwnerMap, Placement, place
from tailbound.codec.shape import Shape
from tailbound.wire.schema import op_label

_U32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Layout:
    """What two ranks must agree on to exchange an op.

    Attributes:
        key: (bucket index, numel of the bucket, chunk, codec mode): whose scales are carried on (CODEC.md 1).
        shape: rows and groups of this chunk.
        tag: 16-bit layout tag.
        last: whether the step ends with this op.
    """

    key: tuple[int, int, int, int]
    shape: Shape
    tag: int
    last: bool


@dataclass(frozen=True)
class Place:
    """One op placed in the rings: label, layout, and the first row sequence of every ring."""

    label: int
    step: int
    index: int
    layout: Layout
    placement: Placement
    result_seq: int
    sum_seqs: tuple[int, ...]
    previous: int


class Sequence:
    """Assigns places in order; ``assign`` for launched ops, ``predict`` for those that only packets name."""

    def __init__(self, ranks: int, owner_map: OwnerMap, first_step: int = 0) -> None:
        self._ranks = ranks
        self._map = owner_map
        self._step, self._index = first_step, 0
        self._result_seq = 0
        self._sum_seqs = (0,) * ranks
        self._previous = (op_label(first_step, 0) - 1) & _U32
        self._current: list[Layout] = []
        self._history: list[tuple[Layout, ...]] = []  # the last two finished steps
        self._ahead: list[Place] = []

    @property
    def next_label(self) -> int:
        """Label of the next op to be assigned or predicted."""
        return op_label(self._step, self._index)

    @property
    def upcoming(self) -> int:
        """Label of the next op to be launched: the first prediction still to come true, else ``next_label``."""
        return self._ahead[0].label if self._ahead else self.next_label

    @property
    def stable(self) -> bool:
        """Whether the last two steps had the same layout (rule 18), so that predictions are made."""
        return len(self._history) == 2 and self._history[0] == self._history[1]

    def predict(self) -> Place | None:
        """The op after the last one placed, if the layout has been the same for two steps; it stays to be launched."""
        if not self.stable:
            return None
        steps = self._history[1]
        if self._index >= len(steps) or tuple(self._current) != steps[: self._index]:
            return None
        found = self._place(steps[self._index])
        self._ahead.append(found)
        return found

    def assign(self, layout: Layout) -> tuple[Place, list[Place]]:
        """Places a launched op.

        Returns:
            Its place (the predicted one if it was right) and the predictions that turned out wrong, which must be
            forgotten: this rank's bucket layout changed while others had not told.
        """
        if self._ahead and self._ahead[0].layout == layout:
            return self._ahead.pop(0), []
        wrong, self._ahead = self._ahead, []
        if wrong:
            first = wrong[0]
            self._step, self._index = first.step, first.index
            self._result_seq, self._sum_seqs, self._previous = first.result_seq, first.sum_seqs, first.previous
            steps = self._history[1]
            self._current = list(steps[: first.index])
            self._history = []
        return self._place(layout), wrong

    def _place(self, layout: Layout) -> Place:
        placement = place(layout.shape, self._map, self._ranks)
        label = op_label(self._step, self._index)
        found = Place(
            label, self._step, self._index, layout, placement, self._result_seq, self._sum_seqs, self._previous
        )
        self._result_seq = (self._result_seq + layout.shape.rows) & _U32
        self._sum_seqs = tuple(
            (seq + int(count)) & _U32 for seq, count in zip(self._sum_seqs, placement.counts, strict=True)
        )
        self._previous = label
        self._current.append(layout)
        self._index += 1
        if layout.last:
            self._history = [*self._history[-1:], tuple(self._current)]
            self._current = []
            self._step, self._index = (self._step + 1) & (_U32 >> 10), 0
        return found
