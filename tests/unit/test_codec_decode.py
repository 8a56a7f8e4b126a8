"""The decode pass against the plain numpy reference, bit by bit, on this CPU and as compiled for another (codec-11)."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import reference
from tailbound.codec.decode import MISSING, decode, own_source
from tailbound.codec.records import Coding, Received
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import Shape, shape_for

SCRATCH = Scratch(1408)
SIZES = [1, 256, 1000, 22529, 40000, 90112, 721001]


def results(shape: Shape, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.bool_]]:
    rng = np.random.default_rng(seed)
    codes = rng.integers(1, 256, (shape.rows, shape.codes), dtype=np.uint8)
    scale = rng.uniform(1e-4, 1e-3, shape.rows).astype(np.float32)
    scale *= rng.choice(np.array([-1, 1], np.float32), shape.rows)  # with offsets to be subtracted, and without
    return codes, scale, rng.random(shape.rows) < 0.9


@pytest.mark.parametrize("rotate", [True, False])
def test_decode_equals_the_reference(rotate: bool) -> None:
    for numel in SIZES:
        shape = shape_for(numel, 1408)
        codes, scale, present = results(shape, numel)
        ring = np.zeros((shape.rows + 5, 1408), np.uint8)
        ring[5:, : shape.codes] = codes
        own = np.zeros((shape.rows, 64 + shape.codes), np.uint8)
        own[:, 64:] = codes[::-1]
        k = np.arange(shape.rows)
        source = np.where(k % 3 == 0, [own_source(shape.rows - 1 - row) for row in k], k + 5)
        source[~present] = MISSING
        scale[~present] = np.nan
        out = np.full(numel, np.nan, np.float32)
        received, coding = Received(ring, own, source, scale), Coding(12345, rotate=rotate)
        assert decode(received, shape, coding, out, SCRATCH) == 0
        expected = reference.decode(codes, np.nan_to_num(scale), present, shape, 12345, rotate)
        assert np.array_equal(out.view(np.uint32), expected.view(np.uint32)), numel
        for offset in (1, 3):  # memory that is not aligned to a cache line takes another path
            other = np.full(numel + offset, np.nan, np.float32)[offset:]
            decode(received, shape, coding, other, SCRATCH)
            assert np.array_equal(out.view(np.uint32), other.view(np.uint32)), numel


@pytest.mark.parametrize("rotate", [True, False])
def test_sums_of_a_switch_are_decoded_like_the_reference(rotate: bool) -> None:
    for numel in SIZES:
        shape = shape_for(numel, 704)
        rng = np.random.default_rng(numel)
        counts = rng.integers(1, 256, shape.rows).astype(np.uint16)
        sums = (rng.random((shape.rows, shape.codes)) * 254 * counts[:, None] + counts[:, None]).astype(np.uint16)
        scale, present = rng.uniform(1e-4, 1e-3, shape.rows).astype(np.float32), rng.random(shape.rows) < 0.9
        ring = np.zeros((shape.rows + 5, 1408), np.uint8)
        ring[5:, : 2 * shape.codes] = sums.astype(">u2").view(np.uint8)
        source = np.where(present, np.arange(shape.rows) + 5, MISSING)
        counts[~present] = 0
        out = np.full(numel, np.nan, np.float32)
        nothing = np.zeros((0, 64 + shape.codes), np.uint8)
        received = Received(ring, nothing, source, scale, counts)
        assert decode(received, shape, Coding(99, rotate=rotate), out, SCRATCH) == 0
        expected = reference.decode_sums(sums, counts, scale, present, shape, 99, rotate)
        assert np.array_equal(out.view(np.uint32), expected.view(np.uint32)), numel


def test_group_of_which_nothing_came_is_zero_and_counted() -> None:
    shape = shape_for(721001, 1408)
    codes, scale, _ = results(shape)
    source = np.arange(shape.rows)
    source[64:128] = MISSING
    source[-64:] = MISSING
    out = np.full(shape.numel, np.nan, np.float32)
    assert decode(Received(codes, codes[:0], source, scale), shape, Coding(1), out, SCRATCH) == 2
    size = 64 * shape.codes
    assert not out[size : 2 * size].any()
    assert not out[8 * size :].any()
    assert np.count_nonzero(out[:size]) > 0.99 * size


def test_sources_outside_the_ring_are_refused() -> None:
    shape = shape_for(1000, 1408)
    codes, scale, _ = results(shape)
    for bad in (shape.rows, own_source(0)):
        source = np.arange(shape.rows)
        source[3] = bad
        with pytest.raises(ValueError, match="outside the ring"):
            decode(Received(codes, codes[:0], source, scale), shape, Coding(1), np.zeros(1000, np.float32), SCRATCH)


PROGRAM = """
import hashlib
import numpy as np
from tailbound.codec import decode
from tailbound.codec.records import Coding, Received
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import shape_for
shape, rng = shape_for(100001, 1408), np.random.default_rng(5)
codes = rng.integers(1, 256, (shape.rows, shape.codes), dtype=np.uint8)
scale, out = (rng.random(shape.rows) - 0.5).astype(np.float32), np.zeros(shape.numel, np.float32)
source = np.where(rng.random(shape.rows) < 0.9, np.arange(shape.rows), decode.MISSING)
decode.decode(Received(codes, codes[:0], source, scale), shape, Coding(77), out, Scratch(1408))
digest = hashlib.sha256(out.tobytes()).hexdigest()
"""
FRESH = """
(code,) = decode._decode.inspect_asm().values()
print(digest, code.count("mulps"), code.count("vfmadd") + code.count("vfnmadd") + code.count("vfmsub"))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="missing capability 'x86_64': names of other CPUs")
def test_another_kind_of_cpu_decodes_to_the_same_bits(tmp_path: Any) -> None:
    """Code for a machine with fused multiply-add and without AVX-512: none is used, and no bit differs."""
    here: dict[str, Any] = {}
    exec(PROGRAM, here)
    env = os.environ | {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx2,+fma",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    digest, products, fused = subprocess.check_output(
        [sys.executable, "-c", PROGRAM + FRESH], env=env, text=True
    ).split()
    assert digest == here["digest"]
    assert int(products) > 8
    assert int(fused) == 0
