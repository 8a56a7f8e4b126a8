"""Hostile packets by the thousand: those of a pool, changed at random, most of them with their check right again.

A pool is u8[packets, MOST] with i64[packets] lengths. Everything follows from the state of one random generator, so
the same seed makes the same packets on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cases
from kernel_world import HEADERS
from tailbound.kernel.frames import frame
from tailbound.wire.check import final, partial
from tailbound.wire.jit import Scalar, compiled
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import HEADER_BYTES, ROW_STEP, PacketType

#: Longest payload: the world's widest row, and two steps more.
MOST = HEADER_BYTES + cases.WIDTH + 2 * ROW_STEP
#: u64 words that ``forge`` works in.
ROOM = MOST // 8 + 4
_FIELDS = np.array([(offset, dtype.itemsize) for dtype, offset in (f[:2] for f in HEADER_DTYPE.fields.values())])  # type: ignore[union-attr]
_OP, _SENDER, _SEQ, _MAP, _COOKIE = (HEADER_DTYPE.fields[n][1] for n in ("op", "sender", "seq", "map_id", "cookie"))  # type: ignore[index]
_CHECK, _TYPE = (HEADER_DTYPE.fields[n][1] for n in ("check", "type"))  # type: ignore[index]
_CONTRIBUTION = int(PacketType.CONTRIBUTION)
_FOREVER = np.uint64(0x9E3779B97F4A7C15)
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@compiled
def _draw(state: NDArray[np.uint64], below: Scalar) -> Scalar:
    """The next number 0..below - 1 (splitmix64)."""
    state[0] += _FOREVER
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * _A
    z = (z ^ (z >> np.uint64(27))) * _B
    return np.int64((z ^ (z >> np.uint64(31))) % np.uint64(below))


@compiled
def _add(data: NDArray[np.uint8], at: Scalar, size: Scalar, what: Scalar) -> None:
    """Adds to the number in network byte order at ``at``."""
    carry = np.int64(what)
    for i in range(size):
        place = at + size - 1 - i
        carry += np.int64(data[place])
        data[place] = np.uint8(carry & 255)
        carry >>= 8


@compiled
def _change(state: Any, data: NDArray[np.uint8], length: Scalar, other: NDArray[np.uint8]) -> Scalar:
    """One change; the length afterwards."""
    kind = _draw(state, 16) // 2
    field = _draw(state, _FIELDS.shape[0])
    at, size = _FIELDS[field, 0], _FIELDS[field, 1]
    if kind == 0:
        data[_draw(state, max(length, 1))] ^= np.uint8(1 << _draw(state, 8))
    elif kind <= 3:  # a field of another packet
        for i in range(at, at + size):
            data[i] = other[i]
    elif kind == 4:
        _add(data, at, size, _draw(state, 5) - 2)
    elif kind == 5:  # none, all, or half the number circle
        how = _draw(state, 3)
        for i in range(at, at + size):
            data[i] = np.uint8(255 if how == 1 else 0)
        if how == 2:
            data[at] = np.uint8(128)
    elif kind == 6:
        for i in range(at, at + size):
            data[i] = np.uint8(_draw(state, 256))
    elif _draw(state, 4):
        data[at] = np.uint8(_draw(state, 4))
    elif _draw(state, 2):
        return np.int64(min(data.shape[0], ROW_STEP * _draw(state, data.shape[0] // ROW_STEP + 1)))
    else:
        return np.int64(_draw(state, data.shape[0] + 1))
    return length


@compiled
def _mend(data: NDArray[np.uint8], length: Scalar, words: NDArray[np.uint64]) -> None:
    """Makes the check right, where a packet of that length has one."""
    for i in range(length // 8):
        value = np.uint64(0)
        for k in range(8):
            value |= np.uint64(data[8 * i + k]) << np.uint64(8 * k)
        words[i] = value
    state = words[MOST // 8 :]
    state[:] = np.uint64(0)
    partial(words[HEADER_BYTES // 8 : length // 8], state)
    check = final(words[: HEADER_BYTES // 8], state)
    for k in range(8):
        data[_CHECK + k] = np.uint8((check >> np.uint64(56 - 8 * k)) & np.uint64(255))


@compiled
def forge(
    state: NDArray[np.uint64],
    pool: NDArray[np.uint8],
    lengths: NDArray[np.int64],
    moved: NDArray[np.int64],
    ranks: Any,
    payloads: NDArray[np.uint8],
    sizes: NDArray[np.int64],
    sources: NDArray[np.int64],
    words: NDArray[np.uint64],
) -> None:
    """Fills ``payloads`` u8[n, MOST], ``sizes`` and ``sources`` (indices of addresses) i64[n].

    Args:
        state: of the generator, u64[1].
        pool, lengths: what to change.
        moved: i64[5], how far the host has moved on since the pool was made: op, sums, results, map, cookie.
        ranks: (first, end): who sends, as a rule from the address with its number; ``end`` is nobody's.
        words: room for a packet and its check, u64[ROOM].
    """
    for n in range(payloads.shape[0]):
        data, base = payloads[n], _draw(state, pool.shape[0])
        for i in range(MOST):
            data[i] = pool[base, i]
        length = lengths[base]
        if _draw(state, 16):
            _add(data, _MAP, 4, moved[3])
            _add(data, _COOKIE, 4, moved[4])
            _add(data, _OP, 4, moved[0])
            _add(data, _SEQ, 4, moved[1] if data[_TYPE] == _CONTRIBUTION else moved[2])
        for _ in range(max(0, _draw(state, 6) - 2)):
            length = _change(state, data, length, pool[_draw(state, pool.shape[0])])
        if length >= HEADER_BYTES and length % ROW_STEP == 0 and _draw(state, 12):
            _mend(data, length, words)
        sizes[n] = length
        first, end = ranks
        named = np.int64(data[_SENDER]) if length >= HEADER_BYTES else first
        sources[n] = named if first <= named < end and _draw(state, 40) else _draw(state, end + 1)


@compiled
def framed(heads: NDArray[np.uint8], payloads: Any, sizes: Any, sources: Any, frames: NDArray[np.uint8]) -> None:
    """Puts Ethernet, IP and UDP before payloads: u8[n, HEADERS + MOST]; ``heads`` are those of empty ones by source."""
    for n in range(payloads.shape[0]):
        out = frames[n]
        for i in range(HEADERS):
            out[i] = heads[sources[n], i]
        for i in range(sizes[n]):
            out[HEADERS + i] = payloads[n, i]
        _add(out, 16, 2, sizes[n])
        _add(out, 38, 2, sizes[n])
        out[24] = out[25] = 0
        total = np.int64(0)
        for i in range(14, 34, 2):
            total += np.int64(out[i]) << 8 | np.int64(out[i + 1])
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        out[24], out[25] = np.uint8(~total >> 8 & 255), np.uint8(~total & 255)


def heads_of(addresses: Sequence[str], destination: str, port: int) -> NDArray[np.uint8]:
    """Ethernet, IP and UDP of empty packets from ``addresses``: u8[sources, HEADERS]."""
    empty = [frame(b"", address, destination, port, port) for address in addresses]
    return np.frombuffer(b"".join(empty), np.uint8).reshape(len(empty), HEADERS).copy()


def pool_of(packets: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A pool of packets, cut where they are longer than ``MOST``."""
    pool = np.zeros((len(packets), MOST), np.uint8)
    for row, data in zip(pool, packets, strict=True):
        row[: len(data[:MOST])] = np.frombuffer(data[:MOST], np.uint8)
    return pool, np.array([min(len(data), MOST) for data in packets])
