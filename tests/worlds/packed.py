"""Packets as tests make and read them: headers are numpy records, checks and tags the library's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.kernel.core import address, core
from tailbound.transport import control
from tailbound.transport.control import Header
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import HEADER_BYTES, ROW_STEP, VERSION
from tailbound.wire.tag import NO_KEY


def packet(head: Any, payload: bytes, key: NDArray[np.uint64] | None = None) -> bytes:
    """Header and payload with the check filled in, or with a ``key`` (``wire.tag``) the tag and the flag of its epoch.

    The payload is padded with zeros to a multiple of 16 bytes. ``head``: 64 bytes, which stay as they are.
    """
    proven, body = Header.from_buffer_copy(head), payload + bytes(-len(payload) % ROW_STEP)
    core().fast.tb_prove_packet(ctypes.addressof(proven), body, len(body), 0 if key is None else address(key))
    return bytes(proven) + body


def header(**values: Any) -> NDArray[Any]:
    """One header, of shape ``[1]``: version filled in, everything else zero unless given."""
    out = np.zeros(1, HEADER_DTYPE)
    for name, value in {"version": VERSION, **values}.items():
        out[name] = value
    return out


def parse(data: bytes, keys: Sequence[NDArray[np.uint64]] | None = ()) -> tuple[NDArray[Any], bytes] | None:
    """As ``control.parse``; the header has shape ``[1]``."""
    found = control.parse(data, keys or ())
    return None if found is None else (np.frombuffer(bytearray(data[:HEADER_BYTES]), HEADER_DTYPE), found[1])


def proof_of(data: NDArray[np.uint8], key: NDArray[np.uint64] = NO_KEY) -> int:
    """The check or tag that ``data`` (u8[64 + payload]) ought to carry; the epoch's flag is set in it."""
    made = packet(data[:HEADER_BYTES].tobytes(), data[HEADER_BYTES:].tobytes(), key)
    data[2:4] = np.frombuffer(made[2:4], np.uint8)
    return int.from_bytes(made[56:64], "big")
