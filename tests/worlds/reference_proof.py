"""Check and tag in plain Python integers: the definitions that every other implementation is tested with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from packed import proof_of
from tailbound.wire.check import K1, K2, K3, K4
from tailbound.wire.schema import HEADER_BYTES, KEY_WORDS
from tailbound.wire.tag import HEAD_AT

_MASK = (1 << 64) - 1


def check_packet(packet: NDArray[np.uint8]) -> int:
    """The check that ``packet`` (u8[64 + payload]) ought to carry, as the product makes it."""
    return proof_of(packet.copy())  # which says the epoch in the header


def check_reference(header: bytes, payload: bytes) -> int:
    """The check of a packet in plain Python integers; that of the header is taken as zero."""
    data = payload + header[:56] + bytes(8)
    a, b = [0, 0], [0, 0]
    for i in range(len(data) // 8):
        lane = i & 1
        a[lane] = a[lane] + int.from_bytes(data[8 * i : 8 * i + 8], "little") & _MASK
        b[lane] = b[lane] + a[lane] & _MASK
    c = a[0] * K1 + a[1] * K2 + b[0] * K3 + b[1] * K4 & _MASK
    return c ^ c >> 32


def siphash_reference(k0: int, k1: int, message: bytes) -> int:
    """SipHash-2-4 in plain Python integers."""

    def rotated(x: int, by: int) -> int:
        return (x << by | x >> 64 - by) & _MASK

    def mixed(v: list[int], rounds: int) -> None:
        for _ in range(rounds):
            v[0] = v[0] + v[1] & _MASK
            v[1] = rotated(v[1], 13) ^ v[0]
            v[0] = rotated(v[0], 32)
            v[2] = v[2] + v[3] & _MASK
            v[3] = rotated(v[3], 16) ^ v[2]
            v[0] = v[0] + v[3] & _MASK
            v[3] = rotated(v[3], 21) ^ v[0]
            v[2] = v[2] + v[1] & _MASK
            v[1] = rotated(v[1], 17) ^ v[2]
            v[2] = rotated(v[2], 32)

    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]
    data = message + bytes(7 - len(message) % 8) + bytes([len(message) & 255])
    for at in range(0, len(data), 8):
        word = int.from_bytes(data[at : at + 8], "little")
        v[3] ^= word
        mixed(v, 2)
        v[0] ^= word
    v[2] ^= 255
    mixed(v, 4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def tag_reference(header: bytes, payload: bytes, key: NDArray[np.uint64]) -> int:
    """The tag of a packet in plain Python integers.

    Args:
        header: 64 bytes, its flag of the epoch as it is sent; the last 8 (the check field) are not looked at.
        payload: a multiple of 16 bytes.
        key: of the epoch.

    Raises:
        ValueError: a length does not fit.
    """
    if len(header) != HEADER_BYTES or len(payload) % 16 or len(payload) > 8 * (len(key) - KEY_WORDS):
        raise ValueError(f"header of {len(header)} bytes and payload of {len(payload)} do not fit a key of {len(key)}")
    words = [int(word) for word in key.tolist()]
    data = header[:56] + len(payload).to_bytes(8, "little") + payload
    total = 0
    for i in range(len(data) // 8):
        x = int.from_bytes(data[8 * i : 8 * i + 8], "little") + words[HEAD_AT + i] & _MASK
        total = total + x * (x >> 32) & _MASK
    op, seq = int.from_bytes(header[8:12], "big"), int.from_bytes(header[16:20], "big")
    return siphash_reference(words[0], words[1], (op << 32 | seq).to_bytes(8, "little") + total.to_bytes(8, "little"))
