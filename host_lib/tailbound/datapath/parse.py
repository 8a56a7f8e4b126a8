"""Reading a packet in nogil code: the header into host byte order, and the check over all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.datapath.tables import u8_row
from tailbound.wire.check import final
from tailbound.wire.jit import Scalar, compiled
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import HEADER_BYTES


def _order() -> NDArray[np.uint8]:
    """Where each byte of a header in host byte order stands in the packet: every field turned round."""
    order = np.arange(HEADER_BYTES, dtype=np.uint8)
    for dtype, offset in (field[:2] for field in HEADER_DTYPE.fields.values()):  # type: ignore[union-attr]
        order[offset : offset + dtype.itemsize] = order[offset : offset + dtype.itemsize][::-1].copy()
    return order


_ORDER = _order()


@compiled
def read_header(t: Any, packet: NDArray[np.uint8]) -> None:
    """Header of ``packet`` (u8[>= 64]) to ``t.head``, in host byte order."""
    out = u8_row(t.head, 0, HEADER_BYTES)
    for i in range(HEADER_BYTES):
        out[i] = packet[_ORDER[i]]


@compiled
def checksum(words: NDArray[np.uint64]) -> Scalar:
    """The check that a packet ought to carry, without the allocation of ``wire.check.check_packet``.

    Unsigned indices: with signed ones numba asks for every word whether its index is negative, and takes twice as long.
    """
    a0, b0, a1, b1 = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    i = np.uint64(HEADER_BYTES // 8)
    end = np.uint64(words.shape[0])
    while i < end:
        a0 += words[i]
        b0 += a0
        a1 += words[i + np.uint64(1)]
        b1 += a1
        i += np.uint64(2)
    return final(words[: HEADER_BYTES // 8], (a0, b0, a1, b1))  # type: ignore[arg-type]


@compiled
def read_u64(data: NDArray[np.uint8], at: Scalar) -> Scalar:
    """The big-endian u64 at byte ``at``."""
    value = np.uint64(0)
    for i in range(8):
        value = (value << np.uint64(8)) | np.uint64(data[at + i])
    return value


@compiled
def write_u64(data: NDArray[np.uint8], at: Scalar, value: Scalar) -> None:
    """Writes a big-endian u64 to byte ``at``."""
    for i in range(8):
        data[at + i] = np.uint8(value >> np.uint64(56 - 8 * i))
