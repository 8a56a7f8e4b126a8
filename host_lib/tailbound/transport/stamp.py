"""Finishes the headers of packets whose payloads are already in place.

The encode pass leaves codes in packet memory and, per packet, the partial state of the check (``wire.check.partial``).
A header is made late, just before its burst leaves, since marks, deadlines and lateness change until then. So every
burst is stamped from a template (a complete header in network byte order) in which only the fields that differ from
packet to packet are replaced. One nogil call a burst, no allocation, no branch on contents.

Places of the fields come from the schema; a header is eight little-endian u64 words, and a field of one packet is one
masked word.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tailbound.wire.check import final
from tailbound.wire.jit import cached
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import HEADER_BYTES

_WORDS = HEADER_BYTES // 8


def _place(name: str) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Word of the header, left shift in it, and mask of the bits to keep, of a scalar field."""
    dtype, offset = HEADER_DTYPE.fields[name][:2]  # type: ignore[index]
    word, byte = divmod(offset, 8)
    mask = ((1 << 8 * dtype.itemsize) - 1) << 8 * byte
    return np.uint64(word), np.uint64(8 * byte), np.uint64(mask ^ ((1 << 64) - 1))


_SEQ, _SEQ_SHIFT, _SEQ_KEEP = _place("seq")
_ROW, _ROW_SHIFT, _ROW_KEEP = _place("row")
_CONTRIBUTED, _CONTRIBUTED_SHIFT, _CONTRIBUTED_KEEP = _place("contributed")
_PUBLISHED, _PUBLISHED_SHIFT, _PUBLISHED_KEEP = _place("published")
_EXPONENT, _EXPONENT_SHIFT, _EXPONENT_KEEP = _place("exponent")
_NEED, _NEED_SHIFT, _NEED_KEEP = _place("need")
_SCALE, _SCALE_SHIFT, _SCALE_KEEP = _place("scale")
_COUNT, _COUNT_SHIFT, _COUNT_KEEP = _place("count")
_SHIFT, _SHIFT_SHIFT, _SHIFT_KEEP = _place("shift")
_CHECK, _, _ = _place("check")
_FLAGS, _FLAGS_SHIFT, _ = _place("flags")


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _swap16(x: np.uint64) -> np.uint64:
    return ((x >> np.uint64(8)) & np.uint64(0xFF)) | ((x & np.uint64(0xFF)) << np.uint64(8))


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _swap32(x: np.uint64) -> np.uint64:
    x = ((x & np.uint64(0x00FF00FF)) << np.uint64(8)) | ((x >> np.uint64(8)) & np.uint64(0x00FF00FF))
    return ((x & np.uint64(0xFFFF)) << np.uint64(16)) | ((x >> np.uint64(16)) & np.uint64(0xFFFF))


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _swap64(x: np.uint64) -> np.uint64:
    return (_swap32(x & np.uint64(0xFFFFFFFF)) << np.uint64(32)) | _swap32(x >> np.uint64(32))


@cached
@njit(nogil=True, cache=True, boundscheck=False)
def stamp_contributions(
    packets: NDArray[np.uint8],
    first: int,
    count: int,
    head: NDArray[np.uint8],
    states: NDArray[np.uint64],
    exponents: NDArray[np.int16],
    needs: NDArray[np.int16],
    shifts: NDArray[np.uint8],
    seq: int,
    begin: int,
    contributed: int,
    contributed_last: int,
) -> None:
    """Writes the headers of contributions ``first .. first + count - 1``, which are one owner's in sending order.

    Args:
        packets: u8[T, stride], C-contiguous, stride a multiple of 16; codes at [:, 64:] are in place.
        first: first packet to stamp.
        count: packets to stamp.
        head: u8[64], the template; fields named below are replaced.
        states: u64[T, 4], partial checks of the payloads (kept, so that a row can be stamped again).
        exponents: i16[T], ``exponent`` by packet.
        needs: i16[T], ``need`` by packet.
        shifts: u8[T], ``shift`` by packet.
        seq: u32 row sequence of the first place in the owner's list.
        begin: place of packet ``first`` in that list; the others follow, from its end on at the beginning.
        contributed: u32 ``contributed`` mark of all packets but the last of this call.
        contributed_last: u32 mark of the last one: this op where it ends the owner's run, else as ``contributed``.
    """
    words = packets.view(np.uint64)
    base = head.view(np.uint64)
    mark = _swap32(np.uint64(np.uint32(contributed))) << _CONTRIBUTED_SHIFT
    for i in range(count):
        p = first + i
        at = begin + i if begin + i < count else begin + i - count
        out = words[p, :_WORDS]
        for k in range(_WORDS):
            out[k] = base[k]
        if i == count - 1:
            mark = _swap32(np.uint64(np.uint32(contributed_last))) << _CONTRIBUTED_SHIFT
        out[_CONTRIBUTED] = (out[_CONTRIBUTED] & _CONTRIBUTED_KEEP) | mark
        out[_SEQ] = (out[_SEQ] & _SEQ_KEEP) | (_swap32(np.uint64(np.uint32(seq + at))) << _SEQ_SHIFT)
        out[_ROW] = (out[_ROW] & _ROW_KEEP) | (_swap16(np.uint64(np.uint16(i))) << _ROW_SHIFT)
        exponent = _swap16(np.uint64(np.uint16(exponents[p])))
        out[_EXPONENT] = (out[_EXPONENT] & _EXPONENT_KEEP) | (exponent << _EXPONENT_SHIFT)
        out[_NEED] = (out[_NEED] & _NEED_KEEP) | (_swap16(np.uint64(np.uint16(needs[p]))) << _NEED_SHIFT)
        out[_SHIFT] = (out[_SHIFT] & _SHIFT_KEEP) | (np.uint64(shifts[p]) << _SHIFT_SHIFT)
        out[_CHECK] = _swap64(final(out, states[p]))


@cached
@njit(nogil=True, cache=True, boundscheck=False)
def stamp_results(
    packets: NDArray[np.uint8],
    first: int,
    count: int,
    head: NDArray[np.uint8],
    states: NDArray[np.uint64],
    exponents: NDArray[np.int16],
    scales: NDArray[np.float32],
    counts: NDArray[np.uint16],
    seq: int,
    places: NDArray[np.uint32],
    row: int,
    published: int,
    published_last: int,
) -> None:
    """Writes the headers of results ``first .. first + count - 1``, neighbours in this owner's list.

    The same packets go to every peer: ``owner`` in the template is the sending owner's rank.

    Args:
        packets: u8[T, stride], C-contiguous, stride a multiple of 16; codes at [:, 64:] are in place.
        first: first packet to stamp.
        count: packets to stamp.
        head: u8[64], the template; fields named below are replaced.
        states: u64[T, 4], partial checks of the payloads.
        exponents: i16[T], ``exponent`` (of the group for the key's next op) by packet.
        scales: f32[T], ``scale`` by packet.
        counts: u16[T], contributors by packet.
        seq: u32 result-row sequence of the op's row 0.
        places: u32[T], row k of the op by packet: its ``seq`` is ``seq + places[p]``.
        row: u16 place of packet ``first`` in the owner's list; the others follow.
        published: u32 ``published`` mark of all packets but the last of this call.
        published_last: u32 mark of the last one: this op where it ends the run, else as ``published``.
    """
    words = packets.view(np.uint64)
    base = head.view(np.uint64)
    bits = scales.view(np.uint32)
    mark = _swap32(np.uint64(np.uint32(published))) << _PUBLISHED_SHIFT
    for i in range(count):
        p = first + i
        out = words[p, :_WORDS]
        for k in range(_WORDS):
            out[k] = base[k]
        if i == count - 1:
            mark = _swap32(np.uint64(np.uint32(published_last))) << _PUBLISHED_SHIFT
        out[_PUBLISHED] = (out[_PUBLISHED] & _PUBLISHED_KEEP) | mark
        out[_SEQ] = (out[_SEQ] & _SEQ_KEEP) | (_swap32(np.uint64(np.uint32(seq + places[p]))) << _SEQ_SHIFT)
        out[_ROW] = (out[_ROW] & _ROW_KEEP) | (_swap16(np.uint64(np.uint16(row + i))) << _ROW_SHIFT)
        exponent = _swap16(np.uint64(np.uint16(exponents[p])))
        out[_EXPONENT] = (out[_EXPONENT] & _EXPONENT_KEEP) | (exponent << _EXPONENT_SHIFT)
        out[_SCALE] = (out[_SCALE] & _SCALE_KEEP) | (_swap32(np.uint64(bits[p])) << _SCALE_SHIFT)
        out[_COUNT] = (out[_COUNT] & _COUNT_KEEP) | (_swap16(np.uint64(counts[p])) << _COUNT_SHIFT)
        out[_CHECK] = _swap64(final(out, states[p]))


@cached
@njit(nogil=True, cache=True, boundscheck=False)
def stamp_switched(
    packets: NDArray[np.uint8],
    head: NDArray[np.uint8],
    states: NDArray[np.uint64],
    exponents: NDArray[np.int16],
    needs: NDArray[np.int16],
    scales: NDArray[np.float32],
    seq: int,
    places: NDArray[np.int32],
    contributed_last: int,
) -> None:
    """Writes the headers of all contributions of an op to a switch, which copies ``seq`` and ``scale`` into results.

    So ``seq`` is that of the result row, and ``scale`` the value of code 255; nothing is shifted.

    Args:
        packets: u8[T, stride], as for ``stamp_contributions``, in the order of the switch's list.
        head: u8[64], the template; its ``contributed`` mark holds for all packets but the last.
        states: u64[T, 4], partial checks of the payloads.
        exponents: i16[T], ``exponent`` by packet.
        needs: i16[T], ``need`` by packet.
        scales: f32[T], 2^(e/4) by packet.
        seq: u32 result-row sequence of the op's row 0.
        places: i32[T], row k of the op by packet: its ``seq`` is ``seq + places[p]``.
        contributed_last: u32 ``contributed`` mark of the last packet.
    """
    words = packets.view(np.uint64)
    base = head.view(np.uint64)
    bits = scales.view(np.uint32)
    last = _swap32(np.uint64(np.uint32(contributed_last))) << _CONTRIBUTED_SHIFT
    for p in range(words.shape[0]):
        out = words[p, :_WORDS]
        for k in range(_WORDS):
            out[k] = base[k]
        if p == words.shape[0] - 1:
            out[_CONTRIBUTED] = (out[_CONTRIBUTED] & _CONTRIBUTED_KEEP) | last
        out[_SEQ] = (out[_SEQ] & _SEQ_KEEP) | (_swap32(np.uint64(np.uint32(seq + places[p]))) << _SEQ_SHIFT)
        out[_ROW] = (out[_ROW] & _ROW_KEEP) | (_swap16(np.uint64(np.uint16(p))) << _ROW_SHIFT)
        exponent = _swap16(np.uint64(np.uint16(exponents[p])))
        out[_EXPONENT] = (out[_EXPONENT] & _EXPONENT_KEEP) | (exponent << _EXPONENT_SHIFT)
        out[_NEED] = (out[_NEED] & _NEED_KEEP) | (_swap16(np.uint64(np.uint16(needs[p]))) << _NEED_SHIFT)
        out[_SCALE] = (out[_SCALE] & _SCALE_KEEP) | (_swap32(np.uint64(bits[p])) << _SCALE_SHIFT)
        out[_CHECK] = _swap64(final(out, states[p]))


@cached
@njit(nogil=True, cache=True, boundscheck=False)
def restamp(packets: NDArray[np.uint8], states: NDArray[np.uint64], flags: int) -> None:
    """Sets ``flags`` in the headers of packets that have been stamped before, and makes their checks anew.

    Args:
        packets: u8[T, stride], C-contiguous, stride a multiple of 16.
        states: u64[T, 4], partial checks of the payloads.
        flags: bits to set; the others stay.
    """
    words = packets.view(np.uint64)
    more = _swap16(np.uint64(np.uint16(flags))) << _FLAGS_SHIFT
    for p in range(words.shape[0]):
        out = words[p, :_WORDS]
        out[_FLAGS] |= more
        out[_CHECK] = _swap64(final(out, states[p]))
