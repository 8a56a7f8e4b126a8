"""Bodies of the control packets that pass through to the socket: READY and BYE.

READY names an op without bringing rows: «I have launched it, these are my scales, these ranks' scales I have heard».
Body: 32 bytes bitmap of ranks heard, then, for a cold op, one s16 need per group (network byte order).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.wire.schema import MAX_RANKS

_BITMAP_BYTES = MAX_RANKS // 8
#: Bytes of a READY body before the needs.
READY_BYTES = _BITMAP_BYTES


class Ready(NamedTuple):
    """Body of a READY packet."""

    heard: frozenset[int]
    needs: NDArray[np.int16] | None


def encode_ready(heard: set[int], needs: NDArray[np.int16] | None) -> bytes:
    """The body of a READY packet; ``needs`` is i16[groups] for a cold op, else None."""
    bitmap = sum(1 << rank for rank in heard).to_bytes(_BITMAP_BYTES, "big")
    return bitmap if needs is None else bitmap + needs.astype(">i2").tobytes()


def decode_ready(body: bytes, groups: int) -> Ready | None:
    """The body of a READY packet; None if it is too short to hold ``groups`` needs or, without any, the bitmap."""
    if len(body) < _BITMAP_BYTES:
        return None
    bitmap = int.from_bytes(body[:_BITMAP_BYTES], "big")
    heard = frozenset(rank for rank in range(MAX_RANKS) if bitmap >> rank & 1)
    rest = body[_BITMAP_BYTES:]
    if not rest:
        return Ready(heard, None)
    if len(rest) < 2 * groups:
        return None
    return Ready(heard, np.frombuffer(rest, ">i2", groups).astype(np.int16))
