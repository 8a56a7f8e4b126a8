"""Bodies of the control packets that pass through to the socket: READY and REPAIR.

READY names an op without bringing rows: «I have launched it, these are my scales, these ranks' scales I have heard».
Body: 32 bytes bitmap of ranks heard, then, for a cold op, one s16 need per group (network byte order).

REPAIR asks a rank for rows of one list of an op. Header: ``rows`` of that list, ``row`` the place of the first bit.
Body: a bitmap, most significant bit first; a set bit is a missing row. With ``rows`` 0 it only asks for marks.
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


def encode_repair(places: NDArray[np.int64], width: int) -> list[tuple[int, bytes]]:
    """(``row``, body) of the REPAIR packets that ask for ``places`` (i64[], rising), at most ``width`` bytes each."""
    out = []
    while len(places):
        first = int(places[0])
        here = places[places < first + 8 * width]
        bits = np.zeros(int(here[-1]) - first + 1, np.uint8)
        bits[here - first] = 1
        out.append((first, np.packbits(bits).tobytes()))
        places = places[len(here) :]
    return out


def decode_repair(body: bytes, row: int, rows: int) -> NDArray[np.int64] | None:
    """The places that a REPAIR packet asks for (i64[], rising); None if it asks for nothing or beyond ``rows``."""
    places: NDArray[np.int64] = np.flatnonzero(np.unpackbits(np.frombuffer(body, np.uint8))) + row
    if not len(places) or int(places[-1]) >= rows:
        return None
    return places
