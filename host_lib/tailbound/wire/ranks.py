"""Sets of ranks as records have them: bitmaps of ``MAX_RANKS`` bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from typing import Any

from tailbound.wire.schema import MAX_RANKS

WORDS = MAX_RANKS // 64


def bitmap(ranks: Iterable[int]) -> tuple[int, ...]:
    """The words of a bitmap of ``ranks``."""
    bits = sum(1 << rank for rank in set(ranks))
    return tuple(bits >> 64 * i & (1 << 64) - 1 for i in range(WORDS))


class Ranks(MutableSet[int]):
    """A set of ranks over u64[``WORDS``] of a record."""

    def __init__(self, words: Any) -> None:
        self._words = words

    @classmethod
    def _from_iterable(cls, ranks: Iterable[int]) -> set[int]:  # type: ignore[override]
        return set(ranks)

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and bool(self._words[rank >> 6] >> (rank & 63) & 1)

    def __iter__(self) -> Iterator[int]:
        for i, word in enumerate(self._words):
            while word:
                yield 64 * i + (word & -word).bit_length() - 1
                word &= word - 1

    def __len__(self) -> int:
        return sum(word.bit_count() for word in self._words)

    def add(self, rank: int) -> None:
        """Takes ``rank`` in."""
        self._words[rank >> 6] |= 1 << (rank & 63)

    def discard(self, rank: int) -> None:
        """Takes ``rank`` out, if it is there."""
        self._words[rank >> 6] &= ~(1 << (rank & 63))
