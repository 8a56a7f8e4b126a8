"""Op labels, layouts and row sequences: where every op's rows lie in everybody's rings, by counting alone.

A rank numbers its ops (step, index) in launch order and adds up their rows, for every owner and in all. Ranks with the
same history therefore agree on every row sequence without a word; ranks with another history are told apart by the
layout tag. From the second step with an equal layout on, the ops of the next step can be told in advance, so that the
transport of a rank that is still in its backward pass can average and publish for the others (clock-2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tailbound.codec.owners import OwnerMap, Placement, place
from tailbound.codec.shape import Shape
from tailbound.errors import TransportError
from tailbound.transport.agreement import Agreed
from tailbound.transport.steps import index_of, step_distance, step_of
from tailbound.wire.schema import OP_INDEX_BITS, op_label, serial_distance

_U32 = 0xFFFFFFFF
#: Spreads row sequences over the bits of a tag.
_GOLDEN = 0x9E3779B1
#: So many steps back an owner map may turn out to have begun.
REMEMBERED = 8


@dataclass(frozen=True)
class Layout:
    """What two ranks must agree on to exchange an op.

    Attributes:
        key: (bucket index, numel of the bucket, chunk, codec mode and tensors): whose scales are carried on (codec-1).
        shape: rows and groups of this chunk.
        tag: 16-bit layout tag.
        last: whether the step ends with this op.
    """

    key: tuple[int, int, int, int]
    shape: Shape
    tag: int
    last: bool


class Place(NamedTuple):
    """One op placed in the rings: label, layout, and the first row sequence of every ring.

    Its packets carry ``tag``, which tells its layout and its first result row. A rank that foresees another layout of
    a step has ops behind it in other places: no row of these may count.
    """

    label: int
    step: int
    layout: Layout
    placement: Placement
    result_seq: int
    sum_seqs: tuple[int, ...]
    previous: int
    tag: int


@dataclass(frozen=True)
class Position:
    """Where a step begins in everybody's rings, and the owner maps: for a rank that jumps there (clock-20)."""

    step: int
    result_seq: int
    sum_seqs: tuple[int, ...]
    agreed: tuple[Agreed, ...]


def _advance(sums: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
    return tuple([(seq + rows) & _U32 for seq, rows in zip(sums, placement.shares, strict=True)])


def _in_force(maps: Iterable[Agreed], step: int) -> OwnerMap | None:
    """The map of ``step``, if one of ``maps`` has begun by then."""
    begun = [owner_map for since, owner_map in maps if step_distance(step, since) >= 0]
    return begun[-1] if begun else None


class Sequence:
    """Assigns places in order; ``assign`` for launched ops, ``predict`` for those that only packets name."""

    def __init__(self, ranks: int, owner_map: OwnerMap, first_step: int = 0) -> None:
        self._ranks = ranks
        self._maps = [Agreed(first_step, owner_map)]  # by the step they begin with
        self._placed: deque[Place] = deque()  # those of ``REMEMBERED`` steps up to the last launch, and predicted ones
        #: row sequences are not those of the others any more, and only ``jump`` can make them so again
        self.adrift = False
        self._step, self._index = first_step, 0
        self._result_seq = 0
        #: where the next op to be placed begins in the sums rings, by rank
        self.sum_seqs = (0,) * ranks
        self._previous = (op_label(first_step, 0) - 1) & _U32
        self._current: list[Layout] = []
        self._history: list[tuple[Layout, ...]] = []  # the last two finished steps
        #: whether they had the same layout (clock-18), so that predictions are made
        self.stable = False
        #: rows of the ops of a step of the present layout; none while it is not stable
        self.op_rows: tuple[int, ...] = ()
        self._ahead: list[Place] = []
        #: label of the next op to be assigned or predicted; and of the next one to be launched, which is the first
        #: prediction still to come true, if there is one: plain attributes, since both are read in every turn
        self.next_label = self.upcoming = 0
        self._moved()

    def _moved(self) -> None:
        """Another op is next."""
        self.next_label = (self._step << OP_INDEX_BITS) + self._index & _U32  # behind a step that is full: of the next
        self.upcoming = self._ahead[0].label if self._ahead else self.next_label

    def _remember(self, *steps: tuple[Layout, ...]) -> None:
        """``steps``, at most two, are the last finished ones."""
        self._history = list(steps)
        self.stable = len(steps) == 2 and steps[0] == steps[1]
        self.op_rows = tuple([layout.shape.rows for layout in steps[1]]) if self.stable else ()

    @property
    def map(self) -> OwnerMap:
        """The owner map of the next op to be placed."""
        return self.map_at(self._step)

    @property
    def newest_map(self) -> int:
        """Id of the newest owner map known here, which may be still to begin."""
        return self._maps[-1][1].id

    def map_at(self, step: int) -> OwnerMap:
        """The owner map of ``step``, as far as is known now."""
        return _in_force(self._maps, step) or self._maps[0][1]

    def set_maps(self, maps: Iterable[Agreed]) -> list[Place]:
        """Takes the owner maps agreed on, oldest first.

        A rank may hear of a map after its beginning. What it has launched since then stays where it was put, for
        no rank (the others refuse its map id); the ops to come are placed as if the map had been known in time.

        Where a map began before what is remembered, or one may be missing, places are not known any more (``adrift``).

        Returns:
            Predictions that this proves wrong, which must be forgotten.
        """
        before, self._maps = self._maps, list(maps)
        wrong: list[Place] = []
        for i, ahead in enumerate(self._ahead):
            if ahead.placement.owner_map != self.map_at(ahead.step):
                self._ahead, wrong = self._ahead[:i], self._ahead[i:]
                self._take_back(wrong[0])
                self._moved()
                break
        first = self._placed[0].step if self._placed else self._step
        now = _in_force(self._maps, first - 1)
        known, named = {m.id for _, m in before}, {m.id for _, m in self._maps}
        missing = not known & named or _in_force(self._maps, self._step) is None
        if missing or (now is not None and now != _in_force(before, first - 1)):
            self.adrift = True
        elif self._placed:
            self._place_again()
        return wrong

    def _place_again(self) -> None:
        """Replays the places that are remembered by the maps that are known now; of older steps these say nothing."""
        placed, self.sum_seqs = self._placed, self._placed[0].sum_seqs
        self._placed = deque()
        for each in placed:
            owner_map = _in_force(self._maps, each.step) or each.placement.owner_map
            placement = place(each.layout.shape, owner_map, self._ranks)
            self._placed.append(each._replace(placement=placement, sum_seqs=self.sum_seqs))
            self.sum_seqs = _advance(self.sum_seqs, placement)

    def _take_back(self, first: Place) -> None:
        """Goes back to before ``first`` and what was predicted after it."""
        self._step, self._index = first.step, index_of(first.label)
        self._result_seq, self.sum_seqs, self._previous = first.result_seq, first.sum_seqs, first.previous
        while self._placed and serial_distance(self._placed[-1].label, first.label) >= 0:
            self._placed.pop()
        self._current = list(self._history[1][: self._index])

    def position(self) -> Position:
        """Where the step begins that is launched here next, or is under way: what lies before cannot change any more.

        Raises:
            TransportError: the own row sequences are not those of the others (``adrift``).
        """
        if self.adrift:
            raise TransportError("this rank does not know where rows go: ask another one")
        step, result_seq, sums = step_of(self.upcoming), self._result_seq, self.sum_seqs
        if first := next((place for place in self._placed if place.step == step), None):
            result_seq, sums = first.result_seq, first.sum_seqs
        return Position(step, result_seq, sums, tuple(self._maps))

    def jump(self, to: Position) -> None:
        """Goes on at ``to``; predictions are forgotten, the layout of a step stays known."""
        self._step, self._index = to.step, 0
        self._result_seq, self.sum_seqs = to.result_seq, to.sum_seqs
        self._previous = (op_label(to.step, 0) - 1) & _U32
        self._current, self._ahead = [], []
        self._placed.clear()
        self.adrift = False
        self._maps = list(to.agreed)
        self._moved()

    def predict(self) -> Place | None:
        """The op after the last one placed, if the layout has been the same for two steps; it stays to be launched."""
        if not self.stable:
            return None
        steps = self._history[1]
        if tuple(self._current) != steps[: self._index]:
            return None
        found = self._place(steps[self._index])
        self._ahead.append(found)
        self._moved()
        return found

    def expects(self, layout: Layout) -> bool:
        """Whether no prediction is proved wrong by a launch of ``layout``."""
        return not self._ahead or self._ahead[0].layout == layout

    def assign(self, layout: Layout) -> tuple[Place, list[Place]]:
        """Places a launched op.

        Returns:
            Its place (the predicted one if it was right) and the predictions that turned out wrong, which must be
            forgotten: this rank's bucket layout changed while others had not told.
        """
        wrong: list[Place] = []
        if self._ahead and self.expects(layout):
            found = self._ahead.pop(0)
        else:
            wrong, self._ahead = self._ahead, []
            if wrong:
                self._take_back(wrong[0])
                self._remember()
            found = self._place(layout)
        self._moved()
        while step_distance(found.step, self._placed[0].step) >= REMEMBERED:
            self._placed.popleft()
        return found, wrong

    def _place(self, layout: Layout) -> Place:
        placement = place(layout.shape, self.map, self._ranks)
        label = op_label(self._step, self._index)
        at, tag = self._result_seq, layout.tag ^ (self._result_seq * _GOLDEN & _U32) >> 16
        found = Place(label, self._step, layout, placement, at, self.sum_seqs, self._previous, tag)
        self._placed.append(found)
        self._result_seq = (at + layout.shape.rows) & _U32
        self.sum_seqs = _advance(self.sum_seqs, placement)
        self._previous = label
        self._current.append(layout)
        self._index += 1
        if layout.last:
            self._remember(*self._history[-1:], tuple(self._current))
            self._current = []
            self._step, self._index = (self._step + 1) & (_U32 >> 10), 0
        return found
