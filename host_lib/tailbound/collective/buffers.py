"""Memory of one op, kept and used again: in steady state an op allocates nothing."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import Placement
from tailbound.codec.shape import Shape
from tailbound.wire.schema import EXPONENT_NONE, HEADER_BYTES


class Buffers:
    """Packet memory and per-row arrays for one op of ``shape`` on ``rank``."""

    def __init__(self, shape: Shape, placement: Placement, rank: int) -> None:
        rows, groups, own = shape.rows, shape.groups, int(placement.counts[rank])
        stride = HEADER_BYTES + shape.codes
        #: contributions, owner by owner; the own rows are coded here too, but never sent
        self.packets: NDArray[np.uint8] = np.zeros((rows, stride), np.uint8)
        self.partials: NDArray[np.uint64] = np.zeros((rows, 4), np.uint64)
        #: group of the row at every packet position, and what the header says of it
        self.group: NDArray[np.int32] = (placement.row_at // shape.group_rows).astype(np.int32)
        self.packet_exponent: NDArray[np.int16] = np.zeros(rows, np.int16)
        self.packet_need: NDArray[np.int16] = np.zeros(rows, np.int16)
        self.packet_shift: NDArray[np.uint8] = np.zeros(rows, np.uint8)
        self.need: NDArray[np.int16] = np.zeros(groups, np.int16)
        self.shift: NDArray[np.uint8] = np.zeros(groups, np.uint8)
        self.skipped: NDArray[np.uint8] = np.zeros(groups, np.uint8)
        self.exponents: NDArray[np.int16] = np.zeros(groups, np.int16)
        self.unknown: NDArray[np.int16] = np.full(groups, EXPONENT_NONE, np.int16)
        self.need_work: NDArray[np.int16] = np.zeros(groups, np.int16)
        #: results of the own rows; ``own_rows`` says which rows of the op they are, ``own_groups`` of which group
        self.own_rows: NDArray[np.uint32] = placement.rows_of(rank).astype(np.uint32)
        self.own_groups: NDArray[np.int32] = placement.groups_of(rank).astype(np.int32)
        self.results: NDArray[np.uint8] = np.zeros((own, stride), np.uint8)
        self.result_partials: NDArray[np.uint64] = np.zeros((own, 4), np.uint64)
        self.scale: NDArray[np.float32] = np.zeros(own, np.float32)
        self.count: NDArray[np.uint16] = np.zeros(own, np.uint16)
        self.exponent_next: NDArray[np.int16] = np.zeros(own, np.int16)
        self.usable: NDArray[np.uint8] = np.zeros(own, np.uint8)
        #: where every row of the op is read from at the end
        self.source: NDArray[np.int64] = np.zeros(rows, np.int64)
        self.row_scale: NDArray[np.float32] = np.zeros(rows, np.float32)
        self.row_exponent: NDArray[np.int16] = np.zeros(rows, np.int16)


class BufferPool:
    """Hands out ``Buffers`` by shape and takes them back; never more than were in flight at once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._free: defaultdict[tuple[Shape, int], list[Buffers]] = defaultdict(list)

    def take(self, shape: Shape, placement: Placement) -> Buffers:
        """A free one, or a new one when all of this shape are in use."""
        free = self._free[shape, placement.owner_map.id]
        return free.pop() if free else Buffers(shape, placement, self._rank)

    def give(self, shape: Shape, placement: Placement, buffers: Buffers) -> None:
        """Takes ``buffers`` back."""
        self._free[shape, placement.owner_map.id].append(buffers)
