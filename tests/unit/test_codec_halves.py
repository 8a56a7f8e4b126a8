"""Gradients of half precision are coded and decoded as their float32 copies are, bit by bit, without these copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tailbound.codec.decode import MISSING, decode
from tailbound.codec.encode import Encoded, encode, measure
from tailbound.codec.halves import BFLOAT16, FLOAT16, clear, convert, entries, read, write
from tailbound.codec.owners import OwnerMap, place
from tailbound.codec.records import Coding, Packets, Received, Scales
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import Shape, shape_for
from tailbound.collective.coder import HOST
from tailbound.wire.bits import Bits

SCRATCH = Scratch(1408)
TYPES = [BFLOAT16, FLOAT16]
#: every value there is
BITS = np.arange(1 << 16, dtype=np.uint32)
SIZES = [1, 1000, 22529, 100001]


def exact(bits: NDArray[Any], kind: Any) -> NDArray[np.float32]:
    """What bits of a half mean; by numpy, and by the definition of bfloat16."""
    if kind == BFLOAT16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def gaussian(numel: int) -> NDArray[np.float32]:
    return np.random.default_rng(numel).standard_normal(numel, np.float32)


def coded(
    x: NDArray[Any], shape: Shape, coding: Coding, exponents: NDArray[np.int16]
) -> tuple[Encoded, list[NDArray[Any]]]:
    """What ``encode`` says, and all that it writes."""
    positions = place(shape, OwnerMap(1, (0, 1, 2, 3)), 4).position
    packets = Packets(
        np.zeros((shape.rows, 64 + shape.codes), np.uint8), positions, np.zeros((shape.rows, 4), np.uint64)
    )
    scales = Scales(exponents, np.zeros_like(exponents), np.zeros(shape.groups, np.uint8))
    done = encode(x, shape, coding, packets, scales, SCRATCH)
    return done, [packets.memory, packets.partials, *scales]


def nearest(values: NDArray[np.float32], kind: Any) -> NDArray[np.uint16]:
    """Bits of the half next to each value, searched in all of them; of two as near the even one."""
    sign = np.signbit(values)
    finite = exact(BITS[:0x7F80] if kind == BFLOAT16 else BITS[:0x7C00], kind).astype(np.float64)
    steps = np.append(finite, 2 * finite[-1] - finite[-2])  # beyond the largest: infinity, as if it were the next one
    sizes = np.abs(values.astype(np.float64))
    above = np.minimum(np.searchsorted(steps, sizes), len(steps) - 1)
    below = np.maximum(above - 1, 0)
    up, down = steps[above] - sizes, sizes - steps[below]
    bits = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (bits | sign * 0x8000).astype(np.uint16)


def hard_values() -> NDArray[np.float32]:
    """Of all sizes, and next to all half-way values of both types."""
    rng = np.random.default_rng(5)
    halfway = [
        exact(np.arange(0, 0x7F80), BFLOAT16).view(np.uint32) + 0x8000,
        (exact(np.arange(0, 0x7BFF), FLOAT16).astype(np.float64) + exact(np.arange(1, 0x7C00), FLOAT16)) / 2,
    ]
    middle = np.concatenate([halfway[0].astype(np.uint32), np.float32(halfway[1]).view(np.uint32)])
    bits = np.concatenate([middle - 1, middle, middle + 1, rng.integers(0, 0x7F800000, 100_000, dtype=np.uint32)])
    values = bits[bits < 0x7F800000].astype(np.uint32).view(np.float32)
    return np.concatenate([values, -values])


def test_every_half_is_read_as_it_is() -> None:
    group, row = np.zeros(1 << 16, np.float32), np.zeros(32, np.uint16)
    for kind in TYPES:
        bits = BITS.astype(np.uint16)
        for first, count in ((0, 1 << 16), (7, 65529), (65535, 1), (100, 15)):
            group[:] = 7
            read(entries("x", bits.view(kind), shape_for(1 << 16, 1408)), first, count, group, row)
            expected = exact(bits, kind)[first : first + count]
            number = ~np.isnan(expected)
            assert np.array_equal(group[:count].view(np.uint32)[number], expected.view(np.uint32)[number]), kind
            assert np.isnan(group[:count][~number]).all()


@pytest.mark.parametrize("kind", TYPES)
def test_values_are_written_to_the_nearest_half(kind: Any) -> None:
    values, row = hard_values(), np.zeros(32, np.uint16)
    out = np.zeros(values.size + 1, kind)
    write(values, values.size, entries("x", out, shape_for(out.size, 1408)), 1, row)
    assert np.array_equal(out.view(np.uint16)[1:], nearest(values, kind))
    converted = np.zeros(values.size, kind)
    convert(values, converted)
    assert np.array_equal(converted.view(np.uint16), out.view(np.uint16)[1:])


@pytest.mark.parametrize("kind", TYPES)
def test_what_is_no_number_stays_so(kind: Any) -> None:
    values = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    group, row = np.append(values, np.zeros(12, np.float32)), np.zeros(32, np.uint16)
    converted, written = np.zeros(4, kind), np.zeros(4, kind)
    convert(values, converted)
    assert np.array_equal(exact(converted.view(np.uint16), kind), values, equal_nan=True)
    if kind == FLOAT16:  # a decoded value is finite, and bfloat16 holds what float32 does
        write(group, 4, entries("x", written, shape_for(4, 1408)), 0, row)
        assert np.array_equal(exact(written.view(np.uint16), kind), values, equal_nan=True)
    back = np.zeros(4, np.float32)
    convert(converted, back)
    assert np.array_equal(back, values, equal_nan=True)


@pytest.mark.parametrize("bits", [8, 16, (4, 8)])
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("kind", TYPES)
def test_coded_as_the_float32_copy(kind: Any, rotate: bool, bits: Bits) -> None:
    for numel in SIZES:
        shape, x = shape_for(numel, 1408, bits), np.zeros(numel, kind)
        values = gaussian(numel)
        values[::50] *= 30
        convert(values, x)
        copy = exact(x.view(np.uint16), kind)
        coding = Coding(12345, 1, 6, rotate=rotate)
        needs = np.zeros((2, shape.groups), np.int16)
        for one, need in zip((x, copy), needs, strict=True):
            assert measure(one, shape, coding, need, SCRATCH)
        assert np.array_equal(needs[0], needs[1])
        exponents = needs[0] + np.int16(2)
        exponents[::2] -= 40  # shifted, and clipped
        (done, ours), (expected, theirs) = (coded(one, shape, coding, exponents) for one in (x, copy))
        assert done == expected
        assert done.finite
        assert all(np.array_equal(*pair) for pair in zip(ours, theirs, strict=True)), numel


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("kind", TYPES)
def test_decoded_as_a_float32_copy_that_is_converted(kind: Any, rotate: bool, bits: int) -> None:
    for numel in SIZES:
        shape = shape_for(numel, 1408, bits)
        ring = np.random.default_rng(numel).integers(1, 256, (shape.rows, 1408), dtype=np.uint8)
        source = np.arange(shape.rows)
        source[::7] = MISSING
        source[: shape.group_rows] = MISSING  # and a whole group
        scale = np.full(shape.rows, 3e-5, np.float32)  # float16 has numbers that small, but not all their bits
        received = Received(ring, np.zeros((1, 64 + shape.codes), np.uint8), source, scale)
        out, copy, converted = np.full(numel, 7, kind), np.empty(numel, np.float32), np.zeros(numel, kind)
        coding = Coding(12345, rotate=rotate)
        assert decode(received, shape, coding, out, SCRATCH) == decode(received, shape, coding, copy, SCRATCH) == 1
        convert(copy, converted)
        assert np.array_equal(out.view(np.uint16), converted.view(np.uint16)), numel


@pytest.mark.parametrize("kind", TYPES)
def test_nothing_beyond_a_part_is_touched(kind: Any) -> None:
    """A bucket that is cut into ops, each of which has a slice of it."""
    memory = np.full(1000, 7, kind)
    part = memory[100:901]
    shape = shape_for(part.size, 1408)
    received = Received(
        np.full((shape.rows, 1408), 200, np.uint8), np.zeros((1, 64 + shape.codes), np.uint8),
        np.arange(shape.rows), np.ones(shape.rows, np.float32),
    )  # fmt: skip
    decode(received, shape, Coding(1), part, SCRATCH)
    assert (memory[:100] == 7).all()
    assert (memory[901:] == 7).all()
    assert (part != 7).all()
    clear(entries("x", part, shape), 1, 5)
    assert part[0] != 0
    assert not part[1:5].any()
    HOST.keep(exact(part.view(np.uint16), kind), part)
    HOST.clear(part)
    assert not part.any()


def test_not_finite_is_seen() -> None:
    shape = shape_for(100_000, 1408)
    exponents = np.zeros(shape.groups, np.int16)
    for kind in TYPES:
        for value in (np.inf, np.nan):
            x = np.zeros(100_000, kind)
            convert(gaussian(100_000), x)
            convert(np.array([value], np.float32), x[99_999:])
            assert not coded(x, shape, Coding(1), exponents)[0].finite


@pytest.mark.parametrize("dtype", [np.float64, np.int16, np.uint8])
def test_other_types_are_refused(dtype: Any) -> None:
    shape = shape_for(100, 1408)
    with pytest.raises(ValueError, match="not a contiguous float32 array of 100 entries, nor one of float16"):
        measure(np.zeros(100, dtype), shape, Coding(1), np.zeros(1, np.int16), SCRATCH)
