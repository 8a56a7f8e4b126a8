"""Exponents of tensors in the passes of the codec: the reference to the bit, on every way through them (codec-18)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import reference
from device_cases import SCRATCH, SEED, SIZES, Results, check, coder, encoded, gaussian, measured, uneven
from tailbound.codec import encode as host
from tailbound.codec.balance import EVEN, EXPONENT_MOST, Ranges, powers, ranges_of
from tailbound.codec.feedback import read_back, write_residual
from tailbound.codec.halves import BFLOAT16, convert
from tailbound.codec.local import LocalJob, nmse
from tailbound.codec.records import Coding, Packets, Scales
from tailbound.codec.scale import cold_exponents
from tailbound.codec.shape import Shape, shape_for
from tailbound.collective.coder import HOST
from tailbound.wire.bits import BITS, Bits, both_ways


def spread(numel: int, ranges: Ranges, seed: int = 0) -> NDArray[np.float32]:
    """Entries that are larger where their exponents are."""
    return gaussian(numel, seed, 1e-3) * reference.by_entry(ranges.up, ranges, numel)


def exponents_for(x: NDArray[Any], shape: Shape, rotate: bool, ranges: Ranges) -> NDArray[np.int16]:
    return cold_exponents(measured(host, x, shape, rotate, ranges)[None], 2)


@pytest.mark.parametrize("rotate", [True, False])
def test_encode_equals_the_reference(rotate: bool) -> None:
    for numel in SIZES:
        shape, ranges = shape_for(numel, 1408), uneven(numel, numel)
        x = spread(numel, ranges, numel)
        exponents = exponents_for(x, shape, rotate, ranges)
        out = encoded(host, x, shape, exponents, rotate, ranges)
        expected = reference.encode(x, shape, SEED, 1, 6, exponents, rotate, 3, ranges)
        assert out.done == (True, 0)
        assert np.array_equal(out.packets[out.placement.position, 64:], expected.payload), numel
        assert np.array_equal(out.need, expected.need), numel


@given(st.integers(1, 200_000), st.integers(1, 22), st.integers(0, 60), st.booleans(), st.integers(0, 100))
@settings(max_examples=30)
def test_any_shape_shift_and_half_precision(numel: int, width: int, lower: int, rotate: bool, seed: int) -> None:
    shape, ranges = shape_for(numel, 64 * width), uneven(numel, seed)
    half = np.empty(numel, BFLOAT16)
    convert(spread(numel, ranges, seed), half)
    x = (half.astype(np.uint32) << 16).view(np.float32)
    exponents = exponents_for(x, shape, rotate, ranges) - np.int16(lower)
    outs = [encoded(host, each, shape, exponents, rotate, ranges) for each in (x, half)]
    expected = reference.encode(x, shape, SEED, 1, 6, exponents, rotate, 3, ranges)
    for out in outs:
        assert np.array_equal(out.packets[out.placement.position, 64:], expected.payload)
        assert np.array_equal(out.shift, expected.shift)
        assert out.done == (True, expected.clipped)


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_what_codes_leave_unsaid_is_told_in_the_entries_own_size(bits: Bits, rotate: bool) -> None:
    """Error feedback: entries less residual are what the codes say, also where their exponents differ."""
    numel = 100_000
    shape, ranges = shape_for(numel, 1408, bits), uneven(numel)
    x = spread(numel, ranges)
    exponents = exponents_for(x, shape, rotate, ranges)
    out = encoded(host, x, shape, exponents, rotate, ranges)
    coding = Coding(SEED, 1, 6, rotate=rotate, ranks=3, ranges=ranges)
    packets = Packets(out.packets, out.placement.position, out.partials)
    scales = Scales(exponents, out.need, out.shift)
    own = read_back(packets, np.zeros(shape.rows, np.int64), np.zeros(shape.rows, np.float32))
    residual = np.full(numel, np.nan, np.float32)
    write_residual(x, own, scales, shape, coding, residual, SCRATCH)
    error = residual * reference.by_entry(ranges.down, ranges, numel)
    assert np.square(error).mean() < {16: 2e-8, 8: 1e-2, 4: 1e-1}[both_ways(bits)[0]] * 1e-6


@pytest.mark.needs("torch")
@pytest.mark.parametrize("rotate", [True, False])
def test_a_device_gives_the_same_bits(rotate: bool) -> None:
    import torch

    for numel in SIZES[:-1]:
        shape, ranges = shape_for(numel, 1408), uneven(numel, numel)
        x = spread(numel, ranges, numel)
        exponents = exponents_for(x, shape, rotate, ranges)
        check(torch.from_numpy(x), shape, exponents, rotate, ranges)
        for summed in (False, True):
            Results(shape, numel, 0.1, summed=summed).check(rotate, ranges=ranges)


def test_exponents_of_zero_are_none() -> None:
    """Also where ranges meet in a row, and for a value that is as large as one can be."""
    numel = 200_000
    shape, x = shape_for(numel, 1408), gaussian(numel)
    zeros = uneven(numel)._replace(down=np.ones(60, np.float32), up=np.ones(60, np.float32))
    exponents = exponents_for(x, shape, True, EVEN)
    one, other = (encoded(host, x, shape, exponents, True, each) for each in (EVEN, zeros))
    for a, b in zip(one.arrays(), other.arrays(), strict=True):
        assert np.array_equal(a, b)


def test_what_would_overflow_when_exponents_are_put_on_again_is_not_finite() -> None:
    shape, ranges = shape_for(1000, 1408), ranges_of([500, 1000], [EXPONENT_MOST, 0])
    need = np.zeros(shape.groups, np.int16)
    for size, finite in ((2.0**90, True), (2.0**110, False), (np.inf, False), (np.nan, False)):
        x = np.ones(1000, np.float32)
        x[700] = size
        assert host.measure(x, shape, Coding(SEED, ranges=ranges), need, SCRATCH) == finite
    x = np.ones(1000, np.float32)
    x[100] = 2.0**110  # divided by 2^24 before it is looked at
    assert host.measure(x, shape, Coding(SEED, ranges=ranges), need, SCRATCH)


def test_ranges_that_are_none_are_refused() -> None:
    for ends, exponents in (
        ([5, 5], [0, 1]),
        ([5, 3], [0, 1]),
        ([0, 3], [0, 1]),
        ([5], [0, 1]),
        ([5], [25]),
        ([5], [-1]),
    ):
        with pytest.raises(ValueError, match="give"):
            ranges_of(ends, exponents)


@given(st.integers(1, 50_000), st.integers(0, 100), st.sampled_from(["float32", "float16"]))
@settings(max_examples=20)
def test_powers_are_mean_squares(numel: int, seed: int, kind: str) -> None:
    """Of long ranges an eighth is looked at, which is near enough."""
    x, ranges = gaussian(numel, seed).astype(kind), uneven(numel, seed)
    found = powers(x, shape_for(numel, 1408), ranges.ends)
    parts = [x[a:b].astype(np.float64) for a, b in itertools.pairwise([0, *ranges.ends.tolist()])]
    for power, part in zip(found, parts, strict=True):
        assert power == pytest.approx(np.square(part).mean(), rel=1e-12 if len(part) <= 4096 else 0.35)
    with pytest.raises(ValueError, match="within"):
        powers(x, shape_for(numel, 1408), np.array([numel + 1]))


@pytest.mark.needs("torch")
def test_powers_on_a_device() -> None:
    import torch

    x, ranges = gaussian(100_000), uneven(100_000)
    parts = [x[a:b].astype(np.float64) for a, b in itertools.pairwise([0, *ranges.ends.tolist()])]
    found = coder().powers(torch.from_numpy(x), shape_for(100_000, 1408), ranges.ends)
    assert np.allclose(found, [np.square(part).mean() for part in parts], rtol=1e-4)  # sums are in float32


@pytest.mark.needs("torch")
def test_what_averages_need_is_the_same_on_a_device() -> None:
    """Without ``begin``, under several exponents at once; what is not finite has none."""
    import torch

    x, shape = gaussian(100_000), shape_for(100_000, 1408)
    codings = [Coding(7, rotate=rotate, ranges=each) for rotate in (True, False) for each in (EVEN, uneven(100_000))]
    found = coder().needs(torch.from_numpy(x), shape, codings, SCRATCH)
    np.testing.assert_array_equal(found, HOST.needs(x, shape, codings, SCRATCH))
    assert len({need.tobytes() for need in found}) > 1
    x[5] = np.inf
    assert coder().needs(torch.from_numpy(x), shape, codings, SCRATCH) is None
    assert HOST.needs(x, shape, codings, SCRATCH) is None


def test_a_small_tensor_beside_a_large_one_keeps_its_precision() -> None:
    """Two tensors whose sizes differ by 1000 share their groups: without exponents the small one is noise."""
    parts = [np.concatenate([gaussian(70_000, r, 1e3), gaussian(30_000, r + 9)]) for r in range(4)]
    error = {}
    for exponents in ((0, 0), (7, 0)):
        job = LocalJob(4, 100_000)
        job.balance(ranges_of([70_000, 100_000], exponents))
        value = job.step(1, parts, receivers=[0]).outputs[0]
        error[exponents] = nmse(value[70_000:], [x[70_000:] for x in parts]), nmse(value, parts)
    assert error[0, 0][0] > 10
    assert error[7, 0][0] < 0.02
    assert error[7, 0][1] < 1.1 * error[0, 0][1]
