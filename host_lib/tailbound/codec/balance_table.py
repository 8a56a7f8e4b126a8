"""The exponents of all ops of a step, as ranks agree on them: by a digest, which stands for the table (codec-18)."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.balance import EVEN, EXPONENT_MOST, Ranges, ranges_of

#: An op of every step: (bucket index, entries of the bucket, chunk).
Key: TypeAlias = tuple[int, int, int]
#: Of an op: the numbers of its key, its mode, the mark before, and how many ranges and groups follow.
_OP = struct.Struct("<IQIIQII")
#: Digest of the table without exponents, and mark of an op without.
NO_TABLE = 0
#: Scales move by at most so many quarter powers of two.
_MOVE_MOST = 4 * EXPONENT_MOST


class Entry(NamedTuple):
    """Exponents of one op, and by how much its scales move where they replace others.

    Attributes:
        ends, exponents: i64[n], rising, and u8[n]: where its ranges end, and their exponents.
        before: mark of the exponents that are replaced.
        mode: of the op's key, for whose scales the moves are.
        moves: i16[G], quarter powers of two by group (``codec.exponents.moves``).
    """

    ends: NDArray[np.int64]
    exponents: NDArray[np.uint8]
    before: int
    mode: int
    moves: NDArray[np.int16]

    def encode(self, key: Key) -> bytes:
        """As bytes, as the entry of ``key``."""
        head = _OP.pack(*key, self.mode, self.before, len(self.ends), len(self.moves))
        parts = self.ends.astype("<i8"), self.exponents, self.moves.astype("<i2")
        return b"".join([head, *(part.tobytes() for part in parts)])


@dataclass(frozen=True)
class Table:
    """Exponents by op."""

    ops: Mapping[Key, Entry]
    _ranges: dict[Key, Ranges] = field(default_factory=dict, compare=False, repr=False)
    _marks: dict[Key, int] = field(default_factory=dict, compare=False, repr=False)

    def entry(self, key: Key, numel: int) -> Entry | None:
        """What the op ``key`` of ``numel`` entries has; None: all of its exponents are 0, and always were."""
        found = self.ops.get(key)
        return found if found is not None and int(found.ends[-1]) == numel else None

    def ranges(self, key: Key, numel: int) -> Ranges:
        """Ranges of the op ``key`` of ``numel`` entries; ``EVEN`` for one that the table does not have."""
        found = self.entry(key, numel)
        if found is None:
            return EVEN
        if key not in self._ranges:
            ends, exponents = found.ends, found.exponents
            last = np.append(exponents[1:] != exponents[:-1], True)  # neighbours that are equal are one
            self._ranges[key] = ranges_of(ends[last], exponents[last]) if exponents.any() else EVEN
        return self._ranges[key]

    def mark(self, key: Key) -> int:
        """What stands for the entry of ``key``, 64 bits; ``NO_TABLE`` where there is none."""
        found = self.ops.get(key)
        if found is None:
            return NO_TABLE
        if key not in self._marks:
            self._marks[key] = digest_of(found.encode(key))
        return self._marks[key]

    def encode(self) -> bytes:
        """The table as bytes."""
        return b"".join(entry.encode(key) for key, entry in sorted(self.ops.items(), key=lambda item: item[0]))


def digest_of(data: bytes) -> int:
    """What stands for an encoded table: 64 bits, never ``NO_TABLE``."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") or 1


def decode_table(data: bytes) -> Table:
    """The table in ``data``.

    Raises:
        ValueError: it is none.
    """
    ops: dict[Key, Entry] = {}
    at = 0
    while at < len(data):
        if len(data) - at < _OP.size:
            raise ValueError("a table of exponents that ends too early")
        bucket, numel, chunk, mode, before, count, groups = _OP.unpack_from(data, at)
        at += _OP.size
        if count == 0 or len(data) - at < 9 * count + 2 * groups:
            raise ValueError("a table of exponents that ends too early")
        ends = np.frombuffer(data, "<i8", count, at).astype(np.int64)
        exponents = np.frombuffer(data, np.uint8, count, at + 8 * count)
        moves = np.frombuffer(data, "<i2", groups, at + 9 * count).astype(np.int16)
        if (np.diff(ends, prepend=0) <= 0).any() or exponents.max() > EXPONENT_MOST:
            raise ValueError("ranges that do not rise, or exponents that are too large")
        if np.abs(moves.astype(np.int32)).max(initial=0) > _MOVE_MOST:
            raise ValueError("scales that move by more than exponents can")
        ops[bucket, numel, chunk] = Entry(ends, exponents, before, mode, moves)
        at += 9 * count + 2 * groups
    return Table(ops)


class Tables:
    """The tables that a rank knows, by digest. Read from any thread, changed in that of the engine."""

    def __init__(self) -> None:
        self._data: dict[int, bytes] = {}
        self._tables: dict[int, Table] = {}

    def add(self, data: bytes) -> int:
        """Takes an encoded table; returns its digest.

        Raises:
            ValueError: it is none.
        """
        digest = digest_of(data)
        self._tables[digest], self._data[digest] = decode_table(data), data
        return digest

    def knows(self, digest: int) -> bool:
        """Whether its table is here."""
        return digest == NO_TABLE or digest in self._tables

    def encoded(self, digest: int) -> bytes | None:
        """The table as bytes; None: it is not here."""
        return self._data.get(digest)

    def table(self, digest: int) -> Table | None:
        """The table; None: there is none."""
        return self._tables.get(digest)

    def ranges(self, digest: int, key: Key, numel: int) -> Ranges:
        """See ``Table.ranges``; with ``NO_TABLE`` all are ``EVEN``.

        Raises:
            KeyError: the table is not here, so that nothing may be coded by it.
        """
        return EVEN if digest == NO_TABLE else self._tables[digest].ranges(key, numel)

    def entry(self, digest: int, key: Key, numel: int) -> Entry | None:
        """See ``Table.entry``."""
        found = self._tables.get(digest)
        return found.entry(key, numel) if found is not None else None

    def mark(self, digest: int, key: Key, numel: int) -> int:
        """What stands for the exponents of the op ``key`` of ``numel`` entries, and for how its scales came about."""
        found = self._tables.get(digest)
        if found is None:
            return digest  # of a table that is not here nothing may be coded, and nothing is carried on
        return found.mark(key) if found.entry(key, numel) is not None else NO_TABLE

    def marks(self, digests: Collection[int], key: Key) -> set[int]:
        """Marks that scales of the op ``key`` can have while ``digests`` are in use."""
        found = [self._tables[each] for each in digests if each in self._tables]
        before = {table.ops[key].before for table in found if key in table.ops}
        return {NO_TABLE} | {table.mark(key) for table in found} | before

    def forget(self, digest: int) -> None:
        """Forgets one table."""
        self._tables.pop(digest, None)
        self._data.pop(digest, None)

    def keep(self, digests: set[int]) -> None:
        """Forgets all tables but these."""
        for digest in [d for d in self._tables if d not in digests]:
            del self._tables[digest], self._data[digest]
