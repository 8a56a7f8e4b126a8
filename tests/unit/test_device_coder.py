"""Buckets coded on a device, by a form in numpy: what surrounds a form. ``test_device_triton`` has the kernels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_cases import DTYPES, SCRATCH, SEED, Results, check, coder, encoded, finite_need, gaussian, measured
from tailbound.codec import encode as host
from tailbound.codec.decode import own_source
from tailbound.codec.records import Coding, Packets, Scales
from tailbound.codec.scale import cold_exponents
from tailbound.codec.shape import shape_for
from tailbound.wire.bits import Bits
from tailbound.wire.schema import EXPONENT_NONE, key_bytes
from tailbound.wire.tag import key_of

pytestmark = pytest.mark.needs("torch")

BITS = st.sampled_from([16, 8, (4, 8)])


@pytest.mark.parametrize("bits", [8, (4, 8)])
def test_what_tags_are_made_of_is_that_of_the_compiled_pass(bits: Bits) -> None:
    """Rows of every length, in a job with a key. Rule: auth-1."""
    import torch

    key = key_of(np.random.default_rng(5).bytes(key_bytes(1408) - 8), 0)
    for numel in (17, 22_529, 90_112):
        shape, x = shape_for(numel, 1408, bits), gaussian(numel, numel, 1e-3)
        exponents = cold_exponents(measured(host, x, shape)[None], 0)
        keyed, plain = (check(torch.from_numpy(x), shape, exponents, key=k) for k in (key, key[:0]))
        np.testing.assert_array_equal(keyed.packets[:, 64:], plain.packets[:, 64:])
        assert (keyed.partials != plain.partials).any()


@given(
    st.integers(1, 200_000), st.integers(1, 22), st.integers(-30, 20), st.sampled_from(DTYPES), st.booleans(),
    st.integers(0, 100), BITS,
)  # fmt: skip
@settings(max_examples=40)
def test_packets_are_those_of_the_compiled_pass(
    numel: int, width: int, power: int, kind: str, rotate: bool, off: int, bits: Bits
) -> None:
    """Scales that are too small (shifts, clipping) or too large; types are read as they are. Rule: codec-12."""
    import torch

    shape = shape_for(numel, 64 * width, bits)
    tensor = torch.from_numpy(gaussian(numel, off, 10.0 ** min(power, 3 if kind == "float16" else 20)))
    tensor = tensor.to(getattr(torch, kind))
    x = tensor.float().numpy()
    exponents = cold_exponents(measured(host, x, shape, rotate)[None], 2)
    exponents[::2] -= np.int16(off % 37)
    check(tensor, shape, exponents, rotate)


@given(
    st.integers(1, 200_000), st.integers(1, 22), st.sampled_from([0.0, 0.02, 0.5, 0.97, 1.0]), st.booleans(),
    st.integers(0, 100), BITS, st.booleans(),
)  # fmt: skip
@settings(max_examples=40)
def test_averages_are_those_of_the_compiled_pass(
    numel: int, width: int, missing: float, rotate: bool, seed: int, bits: Bits, summed: bool
) -> None:
    """Ranks on a GPU and on a host stay equal. Rules: codec-11, codec-12."""
    Results(shape_for(numel, 64 * width, bits), seed, missing, summed=summed and bits == 8).check(rotate)


def test_no_packet_is_touched_where_a_value_is_not_finite() -> None:
    import torch

    shape, whole = shape_for(100_000, 704), gaussian(100_000)
    exponents = cold_exponents(measured(host, whole, shape)[None], 2)
    for value, at in zip([np.nan, -np.inf, 3e38], [0, 50_000, 99_999], strict=True):
        x = whole.copy()
        x[at] = value
        out = encoded(coder(), torch.from_numpy(x), shape, exponents)
        assert not out.done.finite, (value, at)
        assert (out.packets == 7).all(), (value, at)
    beyond = torch.ones(1000, dtype=torch.float64)
    beyond[3] = 1e300
    assert finite_need(coder(), beyond, shape_for(1000, 1408), Coding(SEED)) is None


def test_zero_is_exactly_128_and_needs_nothing() -> None:
    import torch

    shape = shape_for(100_000, 1408)
    out = encoded(coder(), torch.zeros(100_000), shape, np.zeros(shape.groups, np.int16))
    assert (out.packets[:, 64:] == 128).all()
    assert (out.need == EXPONENT_NONE).all()
    assert not out.shift.any()


@pytest.mark.parametrize("bits", [16, 8, (4, 8)])
def test_what_codes_leave_unsaid_is_that_of_the_host(bits: Bits) -> None:
    """Error feedback; a group that is shifted or clipped. Rule: codec-12."""
    import torch

    from tailbound.codec.feedback import read_back, write_residual

    shape, x = shape_for(40_000 * 5, 704, bits), gaussian(200_000, 3)
    exponents = cold_exponents(measured(host, x, shape)[None], 0)
    exponents[2] -= np.int16(9)
    tensor, coding, told = torch.from_numpy(x), Coding(SEED, 1, 6, ranks=3), []
    for by, data in (host, x), (coder(), tensor):
        out = encoded(by, data, shape, exponents)
        rows = np.empty(shape.rows, np.int64), np.empty(shape.rows, np.float32)
        own = read_back(Packets(out.packets, out.placement.position, out.partials), *rows)
        residual = np.full(shape.numel, np.nan, np.float32)
        write, into = (write_residual, residual) if by is host else (by.write_residual, torch.from_numpy(residual))
        write(data, own, Scales(exponents, out.need, out.shift), shape, coding, into, SCRATCH)
        told.append(residual)
    assert np.array_equal(*(residual.view(np.uint32) for residual in told))
    assert 0 < np.abs(told[0]).mean() < np.abs(x).mean()


def test_sources_outside_the_ring_are_refused() -> None:
    import torch

    results = Results(shape_for(1000, 1408), 5, 0.0)
    ours, out = coder(), torch.zeros(1000)
    for bad in (len(results.ring), own_source(len(results.own))):
        results.source[3] = bad
        with pytest.raises(ValueError, match="outside the ring"):
            results.decoded(ours, out, True)
