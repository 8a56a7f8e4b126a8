"""Between packets and a device that codes for itself: rows of codes in one block, which one transfer takes across.

A device has its codes in row order; packets lie owner by owner, and results wherever they came in. Both ways are one
pass over host memory, and the check of a packet's payload is taken on the way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.decode import MISSING, key_of
from tailbound.codec.hashing import STAGE_RESULT, rounding_seed
from tailbound.codec.records import Coding, Packets, Received
from tailbound.codec.scale import ZERO, root_of
from tailbound.codec.scratch import readonly
from tailbound.codec.shape import Shape
from tailbound.wire.jit import compiled
from tailbound.wire.proof import absorb
from tailbound.wire.schema import HEADER_BYTES
from tailbound.wire.tag import NO_KEY


@compiled
def _pack(codes, position, packets, partials, key):  # type: ignore[no-untyped-def]
    for k in range(codes.shape[0]):
        row = position[k]
        target = packets[row, HEADER_BYTES:]
        for i in range(codes.shape[1]):  # a slice assignment might allocate
            target[i] = codes[k, i]
        state = partials[row]
        state[:] = 0
        absorb(target.view(np.uint64), state, key)


def pack(
    codes: NDArray[np.uint8],
    shape: Shape,
    packets: Packets,
    key: NDArray[np.uint64] = NO_KEY,
) -> None:
    """Puts coded rows into their packets, as ``codec.encode.encode`` leaves them.

    Args:
        codes: u8[T, V], bytes of codes, row order.
        shape: of the op.
        packets: written, but for ``position``.
        key: of the tag; empty: packets carry the check.

    Raises:
        ValueError: an array does not fit the shape.
    """
    memory, position, partials = packets
    if codes.shape != (shape.rows, shape.codes) or memory.shape != (shape.rows, HEADER_BYTES + shape.codes):
        raise ValueError(f"codes {codes.shape} or packets {memory.shape} do not fit {shape}")
    _pack(readonly(codes), readonly(position), memory, partials, key)


class Unpacked(NamedTuple):
    """Result rows in one block, for a device.

    Attributes:
        codes: u8[T, V] in row order; of a switch's sums u8[T, 2 V], big-endian.
        factors: f32[T], what a distance from zero means; 0 where the row is missing.
        zeros: i32[T], of sums: the sum that means zero.
        keys: i32[T], what a column's part in a rounding offset is subtracted from; -1 where no offset is.
        group_factors: f32[G], sqrt(R) / received; 0 where nothing was received. Not of groups of one row.
    """

    codes: NDArray[np.uint8]
    factors: NDArray[np.float32]
    zeros: NDArray[np.int32]
    keys: NDArray[np.int32]
    group_factors: NDArray[np.float32]


@compiled
def _unpack(received, layout, blank, span, keyed, out):  # type: ignore[no-untyped-def]
    """``blank``: a row of zeros; ``keyed``: (whether offsets may be taken off, their seed)."""
    ring, own, source, scale, counts = received
    dithered, rounding = keyed
    failed = 0
    summed = counts.shape[0] > 0
    width = out.codes.shape[1]
    here = 0
    for k in range(source.shape[0]):
        at = source[k]
        if at >= ring.shape[0] or -at - 2 >= own.shape[0]:
            return -1
        g = layout.of[k]
        if k == layout.rows[g]:
            here = 0
        out.keys[k] = -1
        if at == MISSING:
            out.factors[k] = np.float32(0.0)
            out.zeros[k] = ZERO
            for i in range(width):
                out.codes[k, i] = blank[i]
        else:
            here += 1
            out.factors[k] = np.float32(np.float64(abs(scale[k]) if dithered else scale[k]) / span)
            if dithered and scale[k] < 0:
                out.keys[k] = key_of(rounding, k) & np.uint32(0xFFFF)
            if summed:
                out.factors[k] = np.float32(np.float64(scale[k]) / (span * np.int64(counts[k])))
                out.zeros[k] = ZERO * np.int32(counts[k])
            row = ring[at] if at >= 0 else own[-at - 2, HEADER_BYTES:]
            for i in range(width):
                out.codes[k, i] = row[i]
        if k == layout.rows[g + 1] - 1:
            failed += here == 0
            root = root_of(layout.rows[g + 1] - layout.rows[g])
            out.group_factors[g] = np.float32(root / here) if here else np.float32(0.0)
    return failed


def unpack(received: Received, shape: Shape, coding: Coding, out: Unpacked, stage: int = STAGE_RESULT) -> int:
    """Collects an op's rows in one block, missing ones as rows of zeros.

    Args:
        received: as of ``codec.decode.decode``.
        shape: of the rows, results or contributions.
        coding: of the op.
        out: written.
        stage: whose rounding offsets the codes have.

    Returns:
        Groups of which nothing was received.

    Raises:
        ValueError: an array does not fit the shape, or a source is out of range.
    """
    ring, own, source, scale, counts = received
    width = shape.codes * (1 + (len(counts) > 0))
    if out.codes.shape != (shape.rows, width) or width > ring.shape[1] or len(source) != shape.rows:
        raise ValueError(f"codes {out.codes.shape}, ring {ring.shape} or {len(source)} sources do not fit {shape}")
    rows = Received(readonly(ring), readonly(own), readonly(source), readonly(scale), counts)
    blank = shape.code.zeros(width)
    if len(counts):
        blank[::2] = 0  # big-endian sums of one contributor
    keyed = shape.code.offsets, np.uint32(rounding_seed(coding.seed, stage))
    failed = _unpack(rows, shape.layout, blank, shape.code.span, keyed, out)
    if failed < 0:
        raise ValueError(f"a source lies outside the ring of {ring.shape[0]} rows or the {own.shape[0]} own rows")
    return int(failed)
