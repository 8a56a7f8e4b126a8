"""Averages made for a device against the compiled pass, bit by bit: ranks on a GPU and on a host stay equal.

Rule: codec-11.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_cases import DTYPES, Results, coder, shapes_of
from tailbound.codec.decode import MISSING, own_source
from tailbound.codec.shape import shape_for
from tailbound.wire.bits import Bits

pytestmark = pytest.mark.needs("torch")


@pytest.mark.parametrize("bits", [16, 8, (4, 8)])
@pytest.mark.parametrize("rotate", [True, False])
def test_averages_of_all_bits_are_those_of_the_compiled_pass(rotate: bool, bits: Bits) -> None:
    """Rule: codec-12."""
    for shape in shapes_of(704, bits):
        Results(shape, shape.numel, 0.1).check(rotate)


@given(
    st.integers(1, 200_000), st.integers(1, 22), st.sampled_from([0.0, 0.02, 0.5, 0.97, 1.0]), st.booleans(),
    st.booleans(), st.integers(0, 100),
)  # fmt: skip
@settings(max_examples=40)
def test_any_shape_and_loss(numel: int, width: int, missing: float, rotate: bool, summed: bool, seed: int) -> None:
    Results(shape_for(numel, 64 * width), seed, missing, summed=summed).check(rotate)


@pytest.mark.parametrize("form", [None, "host"])
@pytest.mark.parametrize("kind", DTYPES[1:])
def test_other_types_are_rounded_once_at_the_end(kind: str, form: str | None) -> None:
    """Rule: codec-12."""
    import torch

    results = Results(shape_for(100_000, 1408), 3, 0.1)
    whole = torch.from_numpy(results.check())
    out = torch.full((100_000,), torch.nan, dtype=getattr(torch, kind))
    results.decoded(coder(form=form), out, True)
    assert torch.equal(out, whole.to(out.dtype))


def test_a_group_of_which_nothing_came_is_zero_and_not_minus_zero() -> None:
    results = Results(shape_for(721_001, 1408), 4, 0.0)
    results.source[64:128] = MISSING
    results.source[-64:] = MISSING
    out = results.check()
    size = 64 * results.shape.codes
    assert not out[size : 2 * size].view(np.uint32).any()
    assert not out[8 * size :].view(np.uint32).any()
    assert np.count_nonzero(out[:size]) > 0.99 * size


def test_sources_outside_the_ring_are_refused_and_its_block_comes_back() -> None:
    import torch

    results = Results(shape_for(1000, 1408), 5, 0.0)
    ours, out = coder(), torch.zeros(1000)
    for bad in (len(results.ring), own_source(len(results.own))):
        results.source[3] = bad
        with pytest.raises(ValueError, match="outside the ring"):
            results.decoded(ours, out, True)
    assert len(ours._space.up._free) == 1
