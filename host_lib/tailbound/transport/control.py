"""Control packets and headers of rows, as records; checks and tags by the library (``host_lib/core/stamp.c``)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.kernel.core import address, core
from tailbound.wire.packets import record_of
from tailbound.wire.schema import HEADER, HEADER_BYTES, KEY_WORDS, ROW_STEP


class Header(record_of(HEADER, ctypes.BigEndianStructure)):  # type: ignore[misc]
    """A packet's header (``wire.schema.HEADER``): its fields are numbers, its memory is in network byte order."""


assert ctypes.sizeof(Header) == HEADER_BYTES


def packet(head: Any, payload: bytes, key: NDArray[np.uint64] | None = None) -> bytes:
    """Header and payload with the check filled in, or with a ``key`` (``wire.tag``) the tag and the flag of its epoch.

    The payload is padded with zeros to a multiple of 16 bytes. ``head``: 64 bytes, which stay as they are.
    """
    proven, body = Header.from_buffer_copy(head), payload + bytes(-len(payload) % ROW_STEP)
    core().fast.tb_prove_packet(ctypes.addressof(proven), body, len(body), 0 if key is None else address(key))
    return bytes(proven) + body


def parse(data: bytes, keys: Sequence[NDArray[np.uint64]] = ()) -> tuple[Header, bytes] | None:
    """Header and payload of a packet that is well formed and whose check is right, else None.

    With ``keys``, those of the even and the odd epoch in force, its tag is to be right.
    """
    even, odd = map(address, keys) if keys else (0, 0)
    most = 8 * (len(keys[0]) - KEY_WORDS) if keys else 0
    if not core().fast.tb_proven(data, len(data), even, odd, most):
        return None
    return Header.from_buffer_copy(data), data[HEADER_BYTES:]
