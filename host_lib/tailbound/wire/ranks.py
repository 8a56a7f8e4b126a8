"""Sets of ranks as records have them: bitmaps of ``MAX_RANKS`` bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tailbound.wire.schema import MAX_RANKS

WORDS = MAX_RANKS // 64


def bitmap(ranks: Iterable[int]) -> tuple[int, ...]:
    """The words of a bitmap of ``ranks``."""
    bits = sum(1 << rank for rank in set(ranks))
    return tuple(bits >> 64 * i & (1 << 64) - 1 for i in range(WORDS))


def ranks_of(words: Sequence[int]) -> set[int]:
    """Ranks of which the bits are set in ``words``, u64[``WORDS``]."""
    if not any(words):  # as a rule
        return set()
    return {64 * i + bit for i, word in enumerate(words) if word for bit in range(64) if word >> bit & 1}


def mark(words: Any, rank: int) -> None:
    """Sets the bit of ``rank``."""
    words[rank >> 6] |= 1 << (rank & 63)
