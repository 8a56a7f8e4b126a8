"""Which rank averages a row, and the order in which rows are sent.

Row ``k = g * R + r`` belongs to ``owners[k mod M]``; an owner's rows are sorted by ``(r, g)``, which is also their
sending order: a tail cut off costs every group at most one row more than another, a dead owner costs every group the
same share. Dealing by ``r mod M`` alone would be unequal (1.5 times at 48 ranks, 2 times at 128).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.shape import Shape
from tailbound.errors import ConfigError
from tailbound.wire.schema import MAX_RANKS


@dataclass(frozen=True)
class OwnerMap:
    """A table of owners with its id; ``owners`` are distinct ranks, at least one."""

    id: int
    owners: tuple[int, ...]


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

    def rows_of(self, owner: int) -> NDArray[np.int32]:
        """Rows k of ``owner``, in place order: i32[counts[owner]]."""
        start = int(self.starts[owner])
        return self.row_at[start : start + int(self.counts[owner])]

    def groups_of(self, owner: int) -> NDArray[np.int32]:
        """Group of each row of ``owner``, in place order: i32[counts[owner]]."""
        groups: NDArray[np.int32] = self.rows_of(owner) // np.int32(self.shape.group_rows)
        return groups


@lru_cache(maxsize=1024)
def place(shape: Shape, owner_map: OwnerMap, world_size: int) -> Placement:
    """Deals the rows of ``shape`` to the owners of ``owner_map``.

    Raises:
        ConfigError: no owner, an owner twice, an owner outside the job, or a job too large.
    """
    owners = owner_map.owners
    if not 1 <= world_size <= MAX_RANKS:
        raise ConfigError(f"world size {world_size} is not in 1..{MAX_RANKS}")
    if not owners or len(set(owners)) != len(owners) or min(owners) < 0 or max(owners) >= world_size:
        raise ConfigError(f"owner map {owner_map.id}: {owners} are not distinct ranks of 0..{world_size - 1}")
    rows = np.arange(shape.rows)
    owner = np.array(owners, np.uint8)[rows % len(owners)]
    row_at = np.lexsort((rows // shape.group_rows, rows % shape.group_rows, owner)).astype(np.int32)
    counts = np.bincount(owner, minlength=world_size).astype(np.int64)
    starts = np.cumsum(counts) - counts
    position = np.empty(shape.rows, np.int32)
    position[row_at] = rows
    within = (position - starts[owner]).astype(np.int32)
    for array in (owner, within, counts, starts, position, row_at):
        array.flags.writeable = False
    return Placement(shape, owner_map, world_size, owner, within, counts, starts, position, row_at)
