"""The encode pass and scales against the plain numpy reference, bit by bit, and bad input.

Rules: codec-3, codec-4, codec-6, codec-7.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from device_cases import CAP, RANK, SCRATCH, SEED, Outputs, encoded, finite_need, gaussian, measured
from reference_proof import check_packet
from tailbound.codec import encode as host
from tailbound.codec.hashing import mix, seed_of
from tailbound.codec.records import Coding, Packets, Scales
from tailbound.codec.scale import NEED_LEAST, cold_exponents, need_of, scale_of, shift_cap_of
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import shape_for
from tailbound.wire.bits import BITS, Bits
from tailbound.wire.check import final
from tailbound.wire.schema import EXPONENT_NONE


@given(
    st.lists(st.integers(1, 50_000) | st.integers(1, 2000), min_size=1, max_size=9), st.booleans(), st.integers(1, 22),
    st.integers(-20, 20), st.booleans(), st.integers(0, 100), st.sampled_from(BITS),
)  # fmt: skip
@settings(max_examples=40)
def test_any_shape_and_scale_equals_the_reference(
    sizes: list[int], known: bool, width: int, power: int, rotate: bool, off: int, bits: Bits
) -> None:
    """Of an op whose tensors are known, or not. Rule: codec-12."""
    numel = sum(sizes)
    shape, x = shape_for(numel, 64 * width, bits, tuple(sizes) if known else ()), gaussian(numel, off, 10.0**power)
    exponents = cold_exponents(measured(host, x, shape, rotate)[None], 2)
    exponents[::2] -= np.int16(off % 37)
    out = encoded(host, x, shape, exponents, rotate)
    expected = reference.encode(x, shape, SEED, RANK, CAP, exponents, rotate, 3)
    assert np.array_equal(out.packets[out.placement.position, 64:], expected.payload)
    assert (out.packets[:, :64] == 7).all()
    assert out.done == (True, expected.clipped)
    assert np.array_equal(out.need, expected.need)
    assert np.array_equal(out.shift, expected.shift)


@pytest.mark.parametrize("numel", [1000, 100000])
def test_partials_finish_to_the_check_of_the_packet(numel: int) -> None:
    shape, x = shape_for(numel, 1408), gaussian(numel)
    out = encoded(host, x, shape, cold_exponents(measured(host, x, shape)[None], 2))
    out.packets[:, :56] = np.random.default_rng(3).integers(0, 256, (shape.rows, 56), dtype=np.uint8)
    out.packets[:, 56:64] = 0
    for packet, state in zip(out.packets, out.partials, strict=True):
        assert final(packet[:64].view(np.uint64), state.copy()) == check_packet(packet)


@pytest.mark.parametrize("rotate", [True, False])
def test_not_finite_is_seen_anywhere(rotate: bool) -> None:
    """In the first group, in the middle and at the very end. Rule: codec-4."""
    shape, whole = shape_for(100000, 1408), gaussian(100000)
    exponents = cold_exponents(measured(host, whole, shape)[None], 2)
    for value, at in itertools.product([np.nan, -np.nan, np.inf, -np.inf, 3e38], [0, 50_000, 99_999]):
        x = whole.copy()
        x[at] = value
        assert not encoded(host, x, shape, exponents, rotate).done.finite, (value, at)
        assert finite_need(host, x, shape, Coding(SEED, rotate=rotate)) is None, (value, at)
    assert encoded(host, whole, shape, exponents, rotate).done.finite


def test_zero_is_exactly_128_and_needs_nothing() -> None:
    """Rule: codec-7. Padding is coded as zero, too."""
    shape, none = shape_for(100000, 1408), np.zeros(shape_for(100000, 1408).groups, np.int16)
    out = encoded(host, np.zeros(100000, np.float32), shape, none)
    assert out.done.finite
    assert (out.packets[:, 64:] == 128).all()
    assert (out.need == EXPONENT_NONE).all()
    shape, x = shape_for(1000, 1408), gaussian(1000)
    out = encoded(host, x, shape, cold_exponents(measured(host, x, shape, False)[None], 2), False)
    assert (out.packets[out.placement.position, 64:].reshape(-1)[1000:] == 128).all()


def test_wrong_arrays_are_refused() -> None:
    shape = shape_for(1000, 1408)
    exponents = np.zeros(shape.groups, np.int16)
    for wrong in (np.zeros(999, np.float32), np.zeros(1000)):
        with pytest.raises(ValueError, match="float32 array of 1000"):
            encoded(host, wrong, shape, exponents)
    with pytest.raises(ValueError, match="scratch for 64"):
        host.measure(np.zeros(40000, np.float32), shape_for(40000, 1408), Coding(1), exponents, Scratch(64))
    out = Outputs(shape)
    packets = Packets(out.packets[:-1], out.placement.position, out.partials)
    scales = Scales(exponents, out.need, out.shift)
    with pytest.raises(ValueError, match="do not fit"):
        host.encode(np.zeros(1000, np.float32), shape, Coding(1), packets, scales, SCRATCH)


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
