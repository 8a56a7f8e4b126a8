"""Memory of one op, kept and used again: in steady state an op allocates nothing.

The results of the own rows outlive their op, so that others can still be sent what they miss of it (clock-23):
those of the last two steps, as long as the result ring of a rank that is behind could take them. That is at most the
own share of one result ring, beside the buffers of ops in flight.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import Placement, first_place
from tailbound.codec.records import Own, Packets, Received, Results, Scales, results
from tailbound.codec.scratch import Words, readonly
from tailbound.codec.shape import Shape
from tailbound.codec.threads import Work
from tailbound.collective.terms import Terms
from tailbound.kernel.core import address
from tailbound.transport.control import Stamp
from tailbound.transport.sequence import Place
from tailbound.transport.steps import step_distance
from tailbound.wire.packets import record_of
from tailbound.wire.schema import GIVEN, HEADER_BYTES, MAX_RANKS, TALLY

#: Steps whose results are kept.
STEPS_KEPT = 2
#: Buffers of a shape that so many steps did without are let go of: DDP's first steps are one bucket with everything.
_STEPS_FREE = 4


class Tally(record_of(TALLY)):  # type: ignore[misc]
    """``tb_tally``."""


class Buffers:
    """Packet memory and per-row arrays for one op of ``shape`` on ``rank``, to which ``ranks`` contribute."""

    def __init__(self, shape: Shape, placement: Placement, rank: int, ranks: int) -> None:
        rows, groups, own = shape.rows, shape.groups, int(placement.counts[rank])
        #: place in every owner's list of the packet that this rank sends first
        self.firsts: NDArray[np.int64] = np.array(
            [first_place(placement, owner, rank, ranks) for owner in range(placement.world_size)], np.int64
        )
        row_at = placement.row_at.copy()
        #: place in its owner's list, of the packet at every position
        self.place: NDArray[np.uint32] = np.empty(rows, np.uint32)
        for first, start, count in zip(self.firsts.tolist(), placement.starts, placement.counts, strict=True):
            row_at[start : start + count] = np.roll(row_at[start : start + count], -first)
            self.place[start : start + count] = np.roll(np.arange(count), -first)
        position: NDArray[np.int32] = np.empty_like(placement.position)
        position[row_at] = np.arange(rows, dtype=np.int32)
        #: contributions, owner by owner in sending order; the own rows are coded here too, but never sent
        self.contributions = Packets(
            np.zeros((rows, HEADER_BYTES + shape.codes), np.uint8), readonly(position), np.zeros((rows, 4), np.uint64)
        )
        self.scales = Scales(np.zeros(groups, np.int16), np.zeros(groups, np.int16), np.zeros(groups, np.uint8))
        #: group of the row at every packet position
        self.group: NDArray[np.int32] = shape.layout.of[row_at]
        memory, _, partials = self.contributions
        exponents, _, weights = self.scales
        self.stamp = Stamp(memory, partials, self.place, self.group, exponents=exponents, weights=weights)
        #: the same by owner, and what the own mean is made of
        self.rows_for = [memory[placement.positions_of(owner)] for owner in range(placement.world_size)]
        #: results of the own rows; ``own_rows`` says which rows of the op they are
        self.own_rows: NDArray[np.uint32] = placement.rows_of(rank).astype(np.uint32)
        self._own_at = address(self.own_rows)
        #: the own rows, without the own contributions and with them
        self.mine = tuple(Own(self.own_rows, self.rows_for[rank], present, self.scales) for present in (False, True))
        #: memory for results that is free
        self.spare: list[Given] = []
        self.given = self._new_given(own, shape.results.codes)
        #: where every row of the op is read from at the end
        self.source: NDArray[np.int64] = np.zeros(rows, np.int64)
        self.row_scale: NDArray[np.float32] = np.zeros(rows, np.float32)
        self.row_exponent: NDArray[np.int16] = np.zeros(rows, np.int16)
        #: contributors by row, where a switch says so
        self.row_count: NDArray[np.uint16] = np.zeros(rows, np.uint16)
        told = self.source, self.row_scale, self.row_exponent, self.row_count, partials, self.firsts
        self.addresses = tuple(map(address, told))
        #: of both halves: own rows that held a contribution, or results that were here, by rank; what that came to
        self.came, self.tally = tuple((ctypes.c_int64 * MAX_RANKS)() for _ in range(2)), (Tally(), Tally())
        self.told = tuple(tuple(map(ctypes.addressof, each)) for each in (self.came, self.tally))
        #: of the passes that code the own rows, make the results and decode them
        self.coding, self.words, self.decoding = Words(), Words(), Words()
        #: packets of a burst at most, of contributions and of results
        self.bursts: tuple[int, ...] = 1, 1
        #: how threads share the first and the last of them
        self.encodes, self.decodes = Work(), Work()

    @property
    def results(self) -> Results:
        """Of the own rows."""
        return self.given.made

    def received(self, ring: NDArray[np.uint8], counts: NDArray[np.uint16]) -> Received:
        """The results of the op, where they lie: others' in ``ring``; ``counts`` as of ``Received``."""
        given = self.given
        given.received = given.received or Received(ring, given.made.packets, self.source, self.row_scale, counts)
        return given.received

    def change(self) -> None:
        """Results go to other memory from now on: what was given stays."""
        given = self.given
        self.given = self.spare.pop() if self.spare else self._new_given(given.rows, given.stride - HEADER_BYTES)

    def _new_given(self, rows: int, codes: int) -> Given:
        given = Given(rows, codes, self.spare)
        given.stamp.places = self._own_at
        return given


class Given(record_of(GIVEN)):  # type: ignore[misc]
    """Results of the own rows of an op, which can be sent again once they were handed out (``tb_given``).

    Args:
        rows: how many.
        codes: bytes of each.
        home: it goes there when it is too old to be asked for.

    Attributes:
        made: the results.
        stamp: of their headers.
        place: of the op, once they were handed out.
        received: of an op whose own results they are.
    """

    place: Place
    received: Received | None = None

    def __init__(self, rows: int, codes: int, home: list[Given]) -> None:
        self.home = home
        self.made = made = results(rows, codes)
        self.stamp = Stamp(made.packets, made.partials, scales=made.scale, counts=made.contributors)
        super().__init__(
            packets=self.stamp.packets, states=self.stamp.states, usable=address(made.usable),
            heads=ctypes.addressof(self.stamp), rows=rows, stride=self.stamp.stride,
        )  # fmt: skip

    def belong(self, place: Place, key: NDArray[np.uint64]) -> None:
        """They are to be results of the op at ``place``, whose packets have ``key``."""
        self._key = key
        self.place, self.key, self.label, self.layout = place, address(key), place.label, place.tag


class BufferPool:
    """Hands out ``Buffers`` by shape and takes them back.

    Never more than were in flight at once, and the results kept, of shapes that the last steps had. Maps that differ in
    other things than owners share them.

    Args:
        make: new ones.
        terms: tell the library which results are kept.
        ring: rows of a result ring: what lies further back nobody can take any more.
    """

    def __init__(self, make: Callable[[Shape, Placement], Buffers], terms: Terms, ring: int) -> None:
        self._make, self._terms, self._ring = make, terms, ring
        self._free: defaultdict[tuple[Shape, tuple[int, ...]], list[Buffers]] = defaultdict(list)
        self._used: dict[tuple[Shape, tuple[int, ...]], int] = {}  # the last step with an op of it
        self._step = 0
        self._kept: deque[Given] = deque()  # results of ops that are over, the oldest first

    def acquire(self, shape: Shape, placement: Placement) -> Buffers:
        """A free one, or a new one when all of this shape are in use."""
        free = self._free[shape, placement.owner_map.owners]
        return free.pop() if free else self._make(shape, placement)

    def give(self, shape: Shape, placement: Placement, buffers: Buffers) -> None:
        """Takes ``buffers`` back."""
        self._free[shape, placement.owner_map.owners].append(buffers)

    def keep(self, place: Place, buffers: Buffers, given: Given | None) -> None:
        """Takes the ``buffers`` of a finished op back; results that were given stay until they are too old."""
        self._used[place.layout.shape, place.placement.owner_map.owners] = place.step
        if given is not None:
            self._keep_results(place, buffers, given)
        self.give(place.layout.shape, place.placement, buffers)
        if place.step != self._step:
            self._step = place.step
            self._forget_unused()

    def _keep_results(self, place: Place, buffers: Buffers, given: Given) -> None:
        given.after, self._terms.given = self._terms.given, ctypes.addressof(given)
        self._kept.append(given)
        end = place.result_seq + place.layout.shape.rows
        while self._kept:
            oldest = self._kept[0].place
            back = (end - oldest.result_seq) & 0xFFFFFFFF
            if back <= self._ring and step_distance(place.step, oldest.step) < STEPS_KEPT:
                break
            old = self._kept.popleft()
            self._kept[0].after = 0  # the newest is never too old
            old.home.append(old)
        buffers.change()

    def _forget_unused(self) -> None:
        """Lets go of what is free and of a shape that the last steps did not have."""
        self._used = {key: step for key, step in self._used.items() if step_distance(self._step, step) < _STEPS_FREE}
        if unused := self._free.keys() - self._used.keys():
            for key in unused:
                del self._free[key]
