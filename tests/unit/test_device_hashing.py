"""Hashes as torch operations against the host's, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from tailbound.codec.hashing import STAGE_CONTRIBUTION, STAGE_RESULT, mix, rounding_seed, row_key, step_of
from tailbound.codec.shape import shape_for

pytestmark = pytest.mark.needs("torch")

WORDS = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x85EBCA6B, 0xC2B2AE35]


def as_words(tensor: Any) -> Any:
    return tensor.numpy().view(np.uint32)


@given(st.lists(st.integers(0, 0xFFFFFFFF), min_size=1, max_size=67))
@settings(max_examples=50)
def test_the_hash_wraps_as_u32_does(words: list[int]) -> None:
    """Lengths around those of vector registers, since vector and scalar code multiply by other instructions."""
    import torch

    from tailbound.torch.device_codec.hashing import fmix

    given = np.array(words + WORDS, np.uint32)
    expected = [mix(int(word)) for word in given]
    assert as_words(fmix(torch.from_numpy(given.view(np.int32).copy()))).tolist() == expected
    top = as_words(fmix(torch.from_numpy(given.view(np.int32).copy()), top_only=True)) >> 16
    assert top.tolist() == [word >> 16 for word in expected]


def test_a_word_keeps_its_bits_as_a_signed_one() -> None:
    from tailbound.torch.device_codec.hashing import signed

    assert [signed(word) & 0xFFFFFFFF for word in WORDS] == WORDS
    assert all(-(1 << 31) <= signed(word) < 1 << 31 for word in WORDS)


@pytest.mark.parametrize(("numel", "seed"), [(1, 0), (1000, 12345), (40_000, 0xFFFFFFF0), (100_000, 12345)])
def test_signs_and_offsets_are_the_hosts(numel: int, seed: int) -> None:
    """Rules: codec-3, codec-7."""
    import torch

    from tailbound.torch.device_codec.hashing import columns, flip_signs, left_below, offsets

    shape = shape_for(numel, 1408)
    y = torch.ones(shape.rows, shape.codes)
    flip_signs(y, seed)
    assert np.array_equal(y.numpy(), reference.signs(shape, seed))
    for stage, step in ((STAGE_CONTRIBUTION, 0), (STAGE_CONTRIBUTION, step_of(254, 255)), (STAGE_RESULT, 0)):
        rounding = np.uint32(rounding_seed(seed, stage))
        keys = np.array([row_key(rounding, k) + step & 0xFFFF for k in range(shape.rows)], np.int32)
        parts = columns(int(rounding), shape.codes, y.device)
        expected = reference.offsets(np.arange(shape.rows), shape.codes, seed, stage, step)
        assert np.array_equal(offsets(torch.from_numpy(keys), parts).numpy(), reference.with_zero(expected))
        below = left_below(torch.from_numpy(~keys & 0xFFFF), parts)
        assert np.array_equal(below.numpy(), 65535 - expected)
        assert not left_below(torch.full_like(below[:, 0], -1), parts).any()
