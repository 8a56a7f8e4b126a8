"""Which rank averages a row, and the order in which rows are sent (codec-2).

Row ``k = g * R + r`` belongs to ``owners[k mod M]``; an owner's rows are sorted by ``(r, g)``, which is also their
sending order, from a place on that differs by sender (``first_place``): a tail cut off costs every group at most one
row more than another, a dead owner costs every group the same share. Dealing by ``r mod M`` alone would be unequal (1.5
times at 48 ranks, 2 times at 128).

A rank that the table does not name owns nothing, as a straggler does (clock-22).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.shape import GROUP_ROWS, Shape
from tailbound.errors import ConfigError
from tailbound.wire.schema import MAX_RANKS

#: Places in an owner's list, rising.
Places = NDArray[np.int64]


@dataclass(frozen=True)
class OwnerMap:
    """A table of owners with its id; ``turns``: keys that came before their time (auth-8).

    ``owners`` holds at least one entry; ranks that it names own equally many rows.
    """

    id: int
    owners: tuple[int, ...]
    turns: int = 0


@dataclass(frozen=True, eq=False)
class Placement:
    """Where every row of an op goes. Arrays are read-only.

    ``owner`` u8[T] and ``place`` i32[T]: owner of row k, and its place in the owner's list. ``counts`` and ``starts``
    i64[world_size]: rows of each owner, and the packet position of its first one. ``position`` i32[T]: packet position
    of row k, ``starts[owner[k]] + place[k]``. ``row_at`` i32[T]: the row at a packet position.
    """

    shape: Shape
    owner_map: OwnerMap
    world_size: int
    owner: NDArray[np.uint8]
    place: NDArray[np.int32]
    counts: NDArray[np.int64]
    starts: NDArray[np.int64]
    position: NDArray[np.int32]
    row_at: NDArray[np.int32]

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """``counts`` as plain numbers, which are asked for many times an op."""
        return tuple(self.counts.tolist())

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Of ``counts``, ``starts``, ``row_at`` and ``owner``."""
        return tuple(int(array.ctypes.data) for array in (self.counts, self.starts, self.row_at, self.owner))

    @cached_property
    def _positions(self) -> tuple[slice, ...]:
        starts: list[int] = self.starts.tolist()
        return tuple(slice(start, start + count) for start, count in zip(starts, self.shares, strict=True))

    def positions_of(self, owner: int) -> slice:
        """Packet positions of the rows of ``owner``."""
        return self._positions[owner]

    def rows_of(self, owner: int) -> NDArray[np.int32]:
        """Rows k of ``owner``, in place order: i32[counts[owner]]."""
        return self.row_at[self.positions_of(owner)]


@lru_cache(maxsize=4096)
def first_place(placement: Placement, owner: int, sender: int, ranks: int) -> int:
    """Place in ``owner``'s list with which ``sender`` begins; from its end it goes on at the beginning.

    Senders begin apart, so that processors that take in two of them seldom want the same row. They begin with an ``r``
    that is a multiple of the length of the owners table: every group has equally many rows before that, and what is cut
    off at the end still costs every group at most one row more than another.

    Args:
        placement: of the op.
        owner: an owner; one that is no rank below ``ranks`` (a switch) takes all lists from the beginning.
        sender: another rank.
        ranks: ranks that contribute.
    """
    if owner >= ranks or owner == sender:
        return 0
    table = placement.owner_map.owners
    turns = placement.shape.group_rows // len(table)
    turn = turns * ((sender - owner) % ranks - 1) // (ranks - 1)
    before = turn * len(table) * GROUP_ROWS // placement.shape.group_rows
    return int(np.searchsorted(_turns(placement.shape)[placement.rows_of(owner)], before))


@lru_cache(maxsize=1024)
def first_places(placement: Placement, owner: int, ranks: int) -> tuple[NDArray[np.int64], int]:
    """``first_place`` of every sender, i64[ranks], and its address."""
    found = np.array([first_place(placement, owner, sender, ranks) for sender in range(ranks)], np.int64)
    return found, int(found.ctypes.data)


def _turns(shape: Shape) -> NDArray[np.int64]:
    """When each row is sent, i64[T] of 0..63: its place in its group, as if each group had 64 rows."""
    rows, of = shape.layout.rows, shape.layout.of
    found: NDArray[np.int64] = (np.arange(shape.rows) - rows[of]) * GROUP_ROWS // np.diff(rows)[of]
    return found


@lru_cache(maxsize=256)
def place(shape: Shape, owner_map: OwnerMap, world_size: int) -> Placement:
    """Deals the rows of ``shape`` to the owners of ``owner_map``.

    Raises:
        ConfigError: no owner, an owner outside the job, or a job too large.
    """
    owners = owner_map.owners
    if not 1 <= world_size <= MAX_RANKS:
        raise ConfigError(f"world size {world_size}: give 1..{MAX_RANKS}")
    if not owners or min(owners) < 0 or max(owners) >= world_size:
        raise ConfigError(f"owner map {owner_map.id}: {owners}: give ranks of 0..{world_size - 1}")
    return Placement(shape, owner_map, world_size, *_deal(shape, owners, world_size))


@lru_cache(maxsize=256)
def _deal(shape: Shape, owners: tuple[int, ...], world_size: int) -> tuple[NDArray[Any], ...]:
    """The arrays of a placement; maps that differ in their ids alone share them."""
    owner = np.resize(np.array(owners, np.uint8), shape.rows)
    by_place = np.argsort(_turns(shape), kind="stable").astype(np.int32)
    row_at = by_place[np.argsort(owner[by_place], kind="stable")]
    counts = np.bincount(owner, minlength=world_size).astype(np.int64)
    starts = np.cumsum(counts) - counts
    position = np.empty(shape.rows, np.int32)
    position[row_at] = np.arange(shape.rows, dtype=np.int32)
    within = (position - starts[owner]).astype(np.int32)
    arrays = (owner, within, counts, starts, position, row_at)
    for array in arrays:
        array.flags.writeable = False
    return arrays
