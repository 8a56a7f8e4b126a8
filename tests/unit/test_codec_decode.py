"""The decode pass against the plain numpy reference, bit by bit, on this CPU and as compiled for another (codec-11)."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import reference
from device_cases import SEED, Results, shapes_of
from tailbound.codec import decode as host_decode
from tailbound.codec.decode import MISSING, own_source
from tailbound.codec.shape import shape_for


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize(("bits", "summed"), [(8, False), (8, True), (16, False)], ids=["8", "sums", "16"])
def test_decode_equals_the_reference(bits: int, summed: bool, rotate: bool) -> None:
    """Rows of the ring, own ones and missing ones."""
    for shape in shapes_of(704, bits):
        numel = shape.numel
        results = Results(shape, numel, 0.1, summed=summed)
        present, scale = results.source != MISSING, np.nan_to_num(results.scale)
        out = np.full(numel, np.nan, np.float32)
        results.decoded(host_decode, out, rotate)
        if results.counts is not None:
            sums = results.ring[5:, : 2 * shape.codes].copy().view(">u2").astype(np.uint16)
            counts = np.where(present, results.counts, 0).astype(np.uint16)
            expected = reference.decode_sums(sums, counts, scale, present, shape, SEED, rotate)
        else:
            codes = results.ring[5:, : shape.codes]
            expected = reference.decode(codes, scale, present, shape, SEED, rotate)
        assert np.array_equal(out.view(np.uint32), expected.view(np.uint32)), numel
        for offset in (1, 3):  # memory that is not aligned to a cache line takes another path
            other = np.full(numel + offset, np.nan, np.float32)[offset:]
            results.decoded(host_decode, other, rotate)
            assert np.array_equal(out.view(np.uint32), other.view(np.uint32)), numel
        half = np.full(numel, 7, np.float16)
        results.decoded(host_decode, half, rotate)
        assert np.array_equal(half, expected.astype(np.float16), equal_nan=True)


def test_group_of_which_nothing_came_is_zero_and_counted() -> None:
    results = Results(shape_for(721001, 1408), 4, 0.0)
    results.source[64:128] = results.source[-64:] = MISSING
    out = np.full(721001, np.nan, np.float32)
    assert results.decoded(host_decode, out, True) == 2
    size = 64 * results.shape.codes
    assert not out[size : 2 * size].any()
    assert not out[8 * size :].any()
    assert np.count_nonzero(out[:size]) > 0.99 * size


def test_sources_outside_the_ring_are_refused() -> None:
    results = Results(shape_for(1000, 1408), 5, 0.0)
    for bad in (len(results.ring), own_source(len(results.own))):
        results.source[3] = bad
        with pytest.raises(ValueError, match="outside the ring"):
            results.decoded(host_decode, np.zeros(1000, np.float32), True)


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
