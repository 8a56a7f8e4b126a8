"""The encode pass and scales against the plain numpy reference, bit by bit, and bad input.

Rules: codec-3, codec-4, codec-6, codec-7.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import reference
from tailbound.codec.encode import Encoded, encode, measure
from tailbound.codec.hashing import mix, seed_of
from tailbound.codec.owners import OwnerMap, place
from tailbound.codec.records import Coding, Packets, Scales
from tailbound.codec.scale import NEED_LEAST, cold_exponents, need_of, scale_of, shift_cap_of
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import Shape, shape_for
from tailbound.wire.check import check_packet, final
from tailbound.wire.schema import EXPONENT_NONE

SCRATCH = Scratch(1408)


def gaussian(numel: int, seed: int = 0, size: float = 1.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(numel) * size).astype(np.float32)


class Outputs:
    """Memory for one rank's ``encode``."""

    def __init__(self, shape: Shape, ranks: int = 4) -> None:
        self.shape = shape
        self.placement = place(shape, OwnerMap(1, tuple(range(ranks))), ranks)
        self.packets = np.full((shape.rows, 64 + shape.codes), 7, np.uint8)
        self.partials = np.zeros((shape.rows, 4), np.uint64)
        self.need = np.zeros(shape.groups, np.int16)
        self.shift = np.zeros(shape.groups, np.uint8)

    def encode(
        self, x: NDArray[np.float32], exponents: NDArray[np.int16], *, rotate: bool = True, **options: Any
    ) -> Encoded:
        packets = Packets(self.packets, self.placement.position, self.partials)
        scales = Scales(exponents, self.need, self.shift)
        return encode(x, self.shape, Coding(12345, 1, 6, rotate=rotate, ranks=3), packets, scales, SCRATCH, **options)

    @property
    def codes(self) -> NDArray[np.uint8]:
        return self.packets[self.placement.position, 64:]


def exponents_for(x: NDArray[np.float32], shape: Shape, rotate: bool = True) -> NDArray[np.int16]:
    need = np.zeros(shape.groups, np.int16)
    assert measure(x, shape, Coding(12345, rotate=rotate), need, SCRATCH)
    return cold_exponents(need[None], 2)


@given(st.integers(1, 200000), st.integers(1, 22), st.integers(-20, 20), st.booleans(), st.integers(0, 100))
@settings(max_examples=30)
def test_any_shape_and_scale_equals_the_reference(numel: int, width: int, power: int, rotate: bool, off: int) -> None:
    shape, x = shape_for(numel, 64 * width), gaussian(numel, off, 10.0**power)
    exponents = exponents_for(x, shape, rotate)
    exponents[::2] -= np.int16(off % 37)
    out = Outputs(shape)
    done = out.encode(x, exponents, rotate=rotate)
    expected = reference.encode(x, shape, 12345, 1, 6, exponents, rotate, 3)
    assert np.array_equal(out.codes, expected.payload)
    assert (done.finite, done.clipped) == (True, expected.clipped)
    assert np.array_equal(out.need, expected.need)
    assert np.array_equal(out.shift, expected.shift)


@pytest.mark.parametrize("numel", [1000, 100000])
def test_partials_finish_to_the_check_of_the_packet(numel: int) -> None:
    shape, x = shape_for(numel, 1408), gaussian(numel)
    out = Outputs(shape)
    out.encode(x, exponents_for(x, shape))
    out.packets[:, :56] = np.random.default_rng(3).integers(0, 256, (shape.rows, 56), dtype=np.uint8)
    out.packets[:, 56:64] = 0
    for packet, state in zip(out.packets, out.partials, strict=True):
        assert final(packet[:64].view(np.uint64), state.copy()) == check_packet(packet)


@pytest.mark.parametrize("rotate", [True, False])
def test_not_finite_is_seen_anywhere(rotate: bool) -> None:
    """In the first group, in the middle and at the very end. Rule: codec-4."""
    shape, whole = shape_for(100000, 1408), gaussian(100000)
    exponents, out = exponents_for(whole, shape), Outputs(shape)
    for value, at in itertools.product([np.nan, -np.nan, np.inf, -np.inf, 3e38], [0, 50_000, 99_999]):
        x = whole.copy()
        x[at] = value
        assert not out.encode(x, exponents, rotate=rotate).finite, (value, at)
        assert not measure(x, shape, Coding(12345, rotate=rotate), out.need, SCRATCH), (value, at)
    assert out.encode(whole, exponents, rotate=rotate).finite


def test_zero_is_exactly_128_and_needs_nothing() -> None:
    """Rule: codec-7."""
    shape = shape_for(100000, 1408)
    out = Outputs(shape)
    assert out.encode(np.zeros(100000, np.float32), np.zeros(shape.groups, np.int16)).finite
    assert (out.codes == 128).all()
    assert (out.need == EXPONENT_NONE).all()


def test_padding_is_coded_as_zero_without_rotation() -> None:
    shape, x = shape_for(1000, 1408), gaussian(1000)
    out = Outputs(shape)
    out.encode(x, exponents_for(x, shape, False), rotate=False)
    assert (out.codes.reshape(-1)[1000:] == 128).all()


def test_threads_may_share_the_groups() -> None:
    shape, x = shape_for(721001, 1408), gaussian(721001)
    exponents = exponents_for(x, shape)
    whole, parts = Outputs(shape), Outputs(shape)
    whole.encode(x, exponents)
    for lo, hi in ((5, 9), (0, 5)):
        parts.encode(x, exponents, groups=(lo, hi))
    assert np.array_equal(whole.packets, parts.packets)
    assert np.array_equal(whole.partials, parts.partials)


def test_wrong_arrays_are_refused() -> None:
    shape = shape_for(1000, 1408)
    out, exponents = Outputs(shape), np.zeros(shape.groups, np.int16)
    with pytest.raises(ValueError, match="float32 array of 1000"):
        out.encode(np.zeros(999, np.float32), exponents)
    with pytest.raises(ValueError, match="float32 array of 1000"):
        out.encode(np.zeros(1000), exponents)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scratch for 64"):
        measure(np.zeros(40000, np.float32), shape_for(40000, 1408), Coding(1), out.need, Scratch(64))
    out.packets = out.packets[:-1]
    with pytest.raises(ValueError, match="do not fit"):
        out.encode(np.zeros(1000, np.float32), exponents)


@given(st.floats(0, 2.0**119, width=32))
def test_need_is_the_smallest_scale_that_holds(value: float) -> None:
    """Rule: codec-5."""
    need = need_of(np.float32(value).view(np.uint32))
    if value == 0:
        assert need == EXPONENT_NONE
    else:
        # quarter powers are compared as float32, hence the allowance of an ulp
        assert value <= scale_of(need) * (1 + 2**-23)
        assert need == NEED_LEAST or value > scale_of(need - 1) * (1 - 2**-23)


@pytest.mark.parametrize("ranks", [1, 4, 128, 129, 257])
def test_shift_cap_fills_the_lanes_and_no_more(ranks: int) -> None:
    """Rule: codec-6."""
    assert 255 * ranks << shift_cap_of(ranks) <= 65535
    assert 255 * ranks << shift_cap_of(ranks) + 1 > 65535


def test_seeds_differ_by_job_and_op() -> None:
    assert len({seed_of(cookie, op) for cookie in range(100) for op in range(100)}) == 10000
    assert mix(0x12345678) == int(reference.fmix(np.array([0x12345678], np.uint32))[0])
