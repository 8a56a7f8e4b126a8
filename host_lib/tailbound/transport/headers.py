"""Finalises the headers of packets whose payloads are already in place.

The encode pass leaves codes in packet memory and, per packet, the state of the check or the tag
(``wire.proof.absorb``). A header is made late, just before its burst leaves, since marks, deadlines and lateness change
until then. So the headers of a run are copies of a template (a complete header in network byte order) in which only the
fields that differ from packet to packet are replaced. One nogil call a run, no allocation, no branch on contents.

Places of the fields come from the schema; a header is eight little-endian u64 words, and a field of one packet is one
masked word.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tailbound.wire.jit import Scalar, cached
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.proof import proven
from tailbound.wire.schema import HEADER_BYTES, PacketType
from tailbound.wire.tag import NO_KEY

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
_TYPE, _TYPE_SHIFT, _ = _place("type")
_OWNER, _OWNER_SHIFT, _OWNER_KEEP = _place("owner")
_ROWS, _ROWS_SHIFT, _ROWS_KEEP = _place("rows")
_CONTRIBUTION_TYPE = np.uint64(PacketType.CONTRIBUTION)


class Fields(NamedTuple):
    """Fields that differ from packet to packet; one without packets is as in the template.

    Attributes:
        exponent: i16[T].
        need: i16[T].
        scale: f32[T].
        counted: u16[T].
    """

    exponent: NDArray[np.int16]
    need: NDArray[np.int16] = np.zeros(0, np.int16)
    scale: NDArray[np.float32] = np.zeros(0, np.float32)
    counted: NDArray[np.uint16] = np.zeros(0, np.uint16)


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


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _begin(line, base, seq, row, exponent):  # type: ignore[no-untyped-def]
    """A copy of the template with what differs in every packet."""
    for k in range(_WORDS):
        line[k] = base[k]
    line[_SEQ] = (line[_SEQ] & _SEQ_KEEP) | (_swap32(np.uint64(np.uint32(seq))) << _SEQ_SHIFT)
    line[_ROW] = (line[_ROW] & _ROW_KEEP) | (_swap16(np.uint64(np.uint16(row))) << _ROW_SHIFT)
    scale = _swap16(np.uint64(np.uint16(exponent))) << _EXPONENT_SHIFT
    line[_EXPONENT] = (line[_EXPONENT] & _EXPONENT_KEEP) | scale


def finalise(
    packets: NDArray[np.uint8],
    head: NDArray[Any],
    states: NDArray[np.uint64],
    fields: Fields,
    seq: int,
    places: NDArray[np.uint32] | NDArray[np.int32],
    mark: int,
    key: NDArray[np.uint64] = NO_KEY,
    last: int = -1,
) -> None:
    """Writes the headers of a run of contributions to a switch, or of results: all ``packets``, in sending order.

    ``row`` is the place in the run. The same results go to every peer: ``owner`` in the template is the sending owner's
    rank.

    Args:
        packets: u8[T, stride], C-contiguous, stride a multiple of 16; codes at [:, 64:] are in place.
        head: the template (``wire.packets.header``); its own mark (``contributed`` of contributions, ``published`` of
            results) holds for all packets but the last.
        states: u64[T, 4], partial checks of the payloads (kept, so that a header can be finalised again).
        fields: what else differs from packet to packet.
        seq: u32 row sequence of the first place.
        places: u32 or i32[T]; ``seq`` of packet p is ``seq + places[p]``.
        mark: u32, of the last packet: this op where it ends the run, else as in the template.
        key: of the op, which ``states`` were made with; empty: packets carry the check.
        last: which packet leaves last, where not all do; below 0: the last one.
    """
    last = last if last >= 0 else len(packets) - 1
    _finalise(packets, head.view(np.uint8), states, fields, seq, places, (mark, last), key)


@cached
@njit(nogil=True, cache=True, boundscheck=False)
def _finalise(
    packets: NDArray[np.uint8],
    head: NDArray[np.uint8],
    states: NDArray[np.uint64],
    fields: Fields,
    seq: Scalar,
    places: NDArray[Any],
    marked: tuple[Scalar, Scalar],
    key: NDArray[np.uint64],
) -> None:
    mark, last = marked
    words = packets.view(np.uint64)
    base = head.view(np.uint64)
    exponents, needs, scales, counts = fields
    bits = scales.view(np.uint32)
    for p in range(words.shape[0]):
        out = words[p, :_WORDS]
        _begin(out, base, seq + places[p], p, exponents[p])
        if needs.shape[0]:
            out[_NEED] = (out[_NEED] & _NEED_KEEP) | (_swap16(np.uint64(np.uint16(needs[p]))) << _NEED_SHIFT)
        if bits.shape[0]:
            out[_SCALE] = (out[_SCALE] & _SCALE_KEEP) | (_swap32(np.uint64(bits[p])) << _SCALE_SHIFT)
        if counts.shape[0]:
            out[_COUNT] = (out[_COUNT] & _COUNT_KEEP) | (_swap16(np.uint64(counts[p])) << _COUNT_SHIFT)
        if p == last:
            new = _swap32(np.uint64(np.uint32(mark)))
            if (out[_TYPE] >> _TYPE_SHIFT) & np.uint64(0xFF) == _CONTRIBUTION_TYPE:
                out[_CONTRIBUTED] = (out[_CONTRIBUTED] & _CONTRIBUTED_KEEP) | (new << _CONTRIBUTED_SHIFT)
            else:
                out[_PUBLISHED] = (out[_PUBLISHED] & _PUBLISHED_KEEP) | (new << _PUBLISHED_SHIFT)
        out[_CHECK] = _swap64(proven(out, states[p], key))


class Contributions(NamedTuple):
    """The packets of one rank's contributions to an op, owner by owner, payloads in place; made once and used again.

    Attributes:
        packets: u8[T, stride], C-contiguous, stride a multiple of 16.
        states: u64[T, 4], partial checks of the payloads.
        places: u32[T], place of a packet's row in its owner's list.
        groups: i32[T], group of its row.
    """

    packets: NDArray[np.uint8]
    states: NDArray[np.uint64]
    places: NDArray[np.uint32]
    groups: NDArray[np.int32]


@cached
@njit(nogil=True, cache=True, boundscheck=False)
def finalise_contributions(
    out: Contributions,
    head: NDArray[np.uint8],
    runs: NDArray[np.int64],
    exponents: NDArray[np.int16],
    needs: NDArray[np.int16],
    shifts: NDArray[np.uint8],
    mark: Scalar,
    key: NDArray[np.uint64],
) -> None:
    """Writes the headers of the contributions to ranks that own rows: a run for each, in sending order.

    Args:
        out: its packets are written.
        head: u8[64], the template (``wire.packets.header``); ``owner`` and ``rows`` are those of the run.
        runs: i64[n, 4]: first packet, packets, owner, and u32 row sequence of the owner's first place.
        exponents, needs, shifts: i16[G], i16[G] and u8[G], of every group.
        mark: u32, of the last packet of each run: this op.
        key: of the op, which ``out.states`` were made with; empty: packets carry the check.
    """
    words = out.packets.view(np.uint64)
    base = head.view(np.uint64)
    last = _swap32(np.uint64(np.uint32(mark))) << _CONTRIBUTED_SHIFT
    for n in range(runs.shape[0]):
        first, count, owner, seq = runs[n, 0], runs[n, 1], runs[n, 2], runs[n, 3]
        to = np.uint64(np.uint8(owner)) << _OWNER_SHIFT
        rows = _swap16(np.uint64(np.uint16(count))) << _ROWS_SHIFT
        for i in range(count):
            p = first + i
            g = out.groups[p]
            line = words[p, :_WORDS]
            _begin(line, base, seq + out.places[p], i, exponents[g])
            line[_OWNER] = (line[_OWNER] & _OWNER_KEEP) | to
            line[_ROWS] = (line[_ROWS] & _ROWS_KEEP) | rows
            line[_NEED] = (line[_NEED] & _NEED_KEEP) | (_swap16(np.uint64(np.uint16(needs[g]))) << _NEED_SHIFT)
            line[_SHIFT] = (line[_SHIFT] & _SHIFT_KEEP) | (np.uint64(shifts[g]) << _SHIFT_SHIFT)
            if i == count - 1:
                line[_CONTRIBUTED] = (line[_CONTRIBUTED] & _CONTRIBUTED_KEEP) | last
            line[_CHECK] = _swap64(proven(line, out.states[p], key))


@cached
@njit(nogil=True, cache=True, boundscheck=False)
def add_flags(packets: NDArray[np.uint8], states: NDArray[np.uint64], flags: int, key: NDArray[np.uint64]) -> None:
    """Sets ``flags`` in finalised headers, and makes their checks or tags anew.

    Args:
        packets: u8[T, stride], C-contiguous, stride a multiple of 16.
        states: u64[T, 4], partial checks of the payloads.
        flags: bits to set; the others stay.
        key: of the op, as in ``finalise``.
    """
    words = packets.view(np.uint64)
    more = _swap16(np.uint64(np.uint16(flags))) << _FLAGS_SHIFT
    for p in range(words.shape[0]):
        out = words[p, :_WORDS]
        out[_FLAGS] |= more
        out[_CHECK] = _swap64(proven(out, states[p], key))
