"""Packets of buckets on a device against the compiled pass, bit by bit, for every shape, type and scale.

Rules: codec-3, codec-4, codec-7, codec-12, auth-1.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_cases import DTYPES, SCRATCH, SEED, check, coder, encoded, finite_need, gaussian, measured, shapes_of
from tailbound.codec import encode as host
from tailbound.codec.records import Coding, Packets, Scales
from tailbound.codec.scale import cold_exponents
from tailbound.codec.shape import shape_for
from tailbound.wire.bits import Bits
from tailbound.wire.schema import EXPONENT_NONE, key_bytes
from tailbound.wire.tag import key_of

pytestmark = pytest.mark.needs("torch")


@pytest.mark.parametrize("bits", [8, (4, 8)])
def test_what_tags_are_made_of_is_that_of_the_compiled_pass(bits: Bits) -> None:
    """Rows of every length, in a job with a key. Rule: auth-1."""
    import torch

    key = key_of(np.random.default_rng(5).bytes(key_bytes(1408) - 8), 0)
    for numel in (17, 22_529, 90_112):
        shape, x = shape_for(numel, 1408, bits), gaussian(numel, numel, 1e-3)
        exponents = cold_exponents(measured(host, x, shape)[None], 0)
        keyed = check(torch.from_numpy(x), shape, exponents, key=key)
        plain = check(torch.from_numpy(x), shape, exponents)
        np.testing.assert_array_equal(keyed.packets[:, 64:], plain.packets[:, 64:])
        assert (keyed.partials != plain.partials).any()


@pytest.mark.parametrize("bits", [16, 8, (4, 8)])
@pytest.mark.parametrize("rotate", [True, False])
def test_packets_of_all_bits_are_those_of_the_compiled_pass(rotate: bool, bits: Bits) -> None:
    """Rule: codec-12."""
    import torch

    for shape in shapes_of(1408, bits):
        x = gaussian(shape.numel, shape.numel, 1e-3)
        exponents = cold_exponents(measured(host, x, shape, rotate)[None], 0)
        exponents[1::2] -= np.int16(3)
        check(torch.from_numpy(x), shape, exponents, rotate)


@given(
    st.integers(1, 200_000),
    st.integers(1, 22),
    st.integers(-30, 20),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(0, 100),
    st.sampled_from([16, 8, (4, 8)]),
)
@settings(max_examples=40)
def test_any_shape_type_and_scale(
    numel: int, width: int, power: int, kind: str, rotate: bool, off: int, bits: Bits
) -> None:
    """Scales that are too small (shifts, clipping) or too large; types are read as they are."""
    import torch

    shape = shape_for(numel, 64 * width, bits)
    tensor = torch.from_numpy(gaussian(numel, off, 10.0 ** min(power, 3 if kind == "float16" else 20)))
    tensor = tensor.to(getattr(torch, kind))
    x = tensor.float().numpy()
    exponents = cold_exponents(measured(host, x, shape, rotate)[None], 2)
    exponents[::2] -= np.int16(off % 37)
    check(tensor, shape, exponents, rotate)


@pytest.mark.parametrize("rotate", [True, False])
def test_not_finite_is_seen_anywhere_and_no_packet_is_touched(rotate: bool) -> None:
    """In the first group, in the middle and at the very end."""
    import torch

    shape, whole = shape_for(100_000, 704), gaussian(100_000)
    exponents = cold_exponents(measured(host, whole, shape)[None], 2)
    assert shape.groups > 2
    for value, at in zip([np.nan, -np.nan, np.inf, -np.inf, 3e38], [0, 50_000, 99_999, 0, 99_999], strict=True):
        x = whole.copy()
        x[at] = value
        assert finite_need(coder(), torch.from_numpy(x), shape, Coding(SEED, rotate=rotate)) is None, (value, at)
        out = encoded(coder(), torch.from_numpy(x), shape, exponents, rotate)
        assert not out.done.finite, (value, at)
        assert (out.packets == 7).all(), (value, at)
    assert encoded(coder(), torch.from_numpy(whole), shape, exponents, rotate).done.finite


def test_a_double_beyond_float32_is_not_finite() -> None:
    import torch

    shape = shape_for(1000, 1408)
    x = torch.ones(1000, dtype=torch.float64)
    x[3] = 1e300
    assert finite_need(coder(), x, shape, Coding(SEED)) is None


@pytest.mark.parametrize("kind", DTYPES)
def test_zero_is_exactly_128_and_needs_nothing(kind: str) -> None:
    import torch

    shape = shape_for(100_000, 1408)
    out = encoded(coder(), torch.zeros(100_000, dtype=getattr(torch, kind)), shape, np.zeros(shape.groups, np.int16))
    assert (out.packets[:, 64:] == 128).all()
    assert (out.need == EXPONENT_NONE).all()
    assert not out.shift.any()


@pytest.mark.parametrize("bits", [16, 8, (4, 8)])
@pytest.mark.parametrize("form", [None, "host"])
@pytest.mark.parametrize("rotate", [True, False])
def test_what_codes_leave_unsaid_is_that_of_the_host(rotate: bool, bits: Bits, form: str | None) -> None:
    """Error feedback; a group that is shifted or clipped. Rule: codec-12."""
    import torch

    from tailbound.codec.feedback import read_back, write_residual

    shape, x = shape_for(40_000 * 5, 704, bits), gaussian(200_000, 3)
    exponents = cold_exponents(measured(host, x, shape, rotate)[None], 0)
    exponents[2] -= np.int16(9)
    tensor, coding, told = torch.from_numpy(x), Coding(SEED, 1, 6, rotate=rotate, ranks=3), []
    for by, data in (host, x), (coder(form=form), tensor):
        out = encoded(by, data, shape, exponents, rotate)
        own = read_back(
            Packets(out.packets, out.placement.position, out.partials),
            np.empty(shape.rows, np.int64),
            np.empty(shape.rows, np.float32),
        )
        scales = Scales(exponents, out.need, out.shift)
        if by is host:
            residual = np.full(shape.numel, np.nan, np.float32)
            write_residual(x, own, scales, shape, coding, residual, SCRATCH)
        else:
            there = torch.full((shape.numel,), torch.nan)
            by.write_residual(tensor, own, scales, shape, coding, there, SCRATCH)
            residual = there.numpy()
        told.append(residual)
    assert np.array_equal(*(residual.view(np.uint32) for residual in told))
    assert 0 < np.abs(told[0]).mean() < np.abs(x).mean()
