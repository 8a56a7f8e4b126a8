"""The exponents of all ops of a step, as ranks agree on them: by a digest, which stands for the table (codec-18)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.balance import EVEN, EXPONENT_MOST, Ranges, ranges_of

#: An op of every step: (bucket index, entries of the bucket, chunk).
Key: TypeAlias = tuple[int, int, int]
#: Of a key: its three numbers, and how many ranges follow, ends before exponents.
_OP = struct.Struct("<IIII")
#: Digest of the table without exponents.
NO_TABLE = 0


@dataclass(frozen=True)
class Table:
    """Exponents by op: ``ops`` has the ends of its ranges (i64[n]) and their exponents (u8[n])."""

    ops: Mapping[Key, tuple[NDArray[np.int64], NDArray[np.uint8]]]
    _ranges: dict[Key, Ranges] = field(default_factory=dict, compare=False, repr=False)

    def ranges(self, key: Key, numel: int) -> Ranges:
        """Ranges of the op ``key`` of ``numel`` entries; ``EVEN`` for one that the table does not have."""
        found = self.ops.get(key)
        if found is None or int(found[0][-1]) != numel:
            return EVEN
        if key not in self._ranges:
            ends, exponents = found
            last = np.append(exponents[1:] != exponents[:-1], True)  # neighbours that are equal are one
            self._ranges[key] = ranges_of(ends[last], exponents[last]) if exponents.any() else EVEN
        return self._ranges[key]

    def encode(self) -> bytes:
        """The table as bytes."""
        parts = []
        for key, (ends, exponents) in sorted(self.ops.items()):
            parts += [_OP.pack(*key, len(ends)), ends.astype("<i8").tobytes(), exponents.tobytes()]
        return b"".join(parts)


def digest_of(data: bytes) -> int:
    """What stands for an encoded table: 64 bits, never ``NO_TABLE``."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") or 1


def decode_table(data: bytes) -> Table:
    """The table in ``data``.

    Raises:
        ValueError: it is none.
    """
    ops: dict[Key, tuple[NDArray[np.int64], NDArray[np.uint8]]] = {}
    at = 0
    while at < len(data):
        if len(data) - at < _OP.size:
            raise ValueError("a table of exponents that ends too early")
        *key, count = _OP.unpack_from(data, at)
        at += _OP.size
        if count == 0 or len(data) - at < 9 * count:
            raise ValueError("a table of exponents that ends too early")
        ends = np.frombuffer(data, "<i8", count, at).astype(np.int64)
        exponents = np.frombuffer(data, np.uint8, count, at + 8 * count)
        if (np.diff(ends, prepend=0) <= 0).any() or exponents.max() > EXPONENT_MOST:
            raise ValueError("ranges that do not rise, or exponents that are too large")
        ops[key[0], key[1], key[2]] = ends, exponents
        at += 9 * count
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

    def forget(self, digest: int) -> None:
        """Forgets one table."""
        self._tables.pop(digest, None)
        self._data.pop(digest, None)

    def keep(self, digests: set[int]) -> None:
        """Forgets all tables but these."""
        for digest in [d for d in self._tables if d not in digests]:
            del self._tables[digest], self._data[digest]
