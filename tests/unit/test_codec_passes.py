"""The passes that encode and decode against the plain numpy reference, bit by bit, for buckets of every type.

Gradients of half precision are coded as their float32 copies are, without these copies.

Rules: codec-3, codec-4, codec-6, codec-7, codec-11, codec-12.
"""

from __future__ import annotations

import itertools
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import reference
from device_cases import (
    SCRATCH,
    SEED,
    WEIGHTS,
    Outputs,
    Results,
    encoded,
    finite_need,
    gaussian,
    measured,
    own_rows,
    shapes_of,
)  # fmt: skip
from tailbound.codec import decode as host_decode
from tailbound.codec import encode as host
from tailbound.codec import laid
from tailbound.codec.decode import MISSING, own_source
from tailbound.codec.feedback import write_residual
from tailbound.codec.format import check_bits
from tailbound.codec.halves import BFLOAT16, FLOAT16, FLOAT32, Entries, clear, convert, read, write
from tailbound.codec.hashing import STAGE_CONTRIBUTION, mix, seed_of
from tailbound.codec.laid import words_at
from tailbound.codec.loader import loader
from tailbound.codec.records import NO_PACKETS, Coding, Packets
from tailbound.codec.scale import agreed, need_of, own_scale, scales_of, weights_of
from tailbound.codec.shape import shape_for
from tailbound.errors import ConfigError
from tailbound.wire.bits import BITS, Bits, both_ways, number_of
from tailbound.wire.jit import compiled
from tailbound.wire.schema import EXPONENT_NONE

HALVES = [BFLOAT16, FLOAT16]
TYPES = [FLOAT32, *HALVES]
each_half = pytest.mark.parametrize("kind", HALVES)


def exact(bits: NDArray[Any], kind: Any) -> NDArray[np.float32]:
    """What bits of a half mean; by numpy, and by the definition of bfloat16."""
    if kind == BFLOAT16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def of_type(kind: Any, values: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """``values`` as a bucket of ``kind``, and the float32 copy of that."""
    if kind == FLOAT32:
        return values, values
    x = np.zeros(values.size, kind)
    convert(values, x)
    return x, exact(x.view(np.uint16), kind)


# -- encode ----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 50_000) | st.integers(1, 2000), min_size=1, max_size=9), st.booleans(), st.integers(1, 22),
    st.integers(-20, 20), st.booleans(), st.integers(0, 100), st.sampled_from(BITS), st.sampled_from(TYPES),
)  # fmt: skip
@settings(max_examples=60)
def test_any_shape_and_scale_equals_the_reference(
    sizes: list[int], known: bool, width: int, power: int, rotate: bool, off: int, bits: Bits, kind: Any
) -> None:
    """Of an op whose tensors are known, or not; by own scales, and by those for a switch, some of which clip."""
    numel, size = sum(sizes), 10.0 ** (min(power, 3) if kind == FLOAT16 else power)
    shape = shape_for(numel, 64 * width, bits, tuple(sizes) if known else ())
    x, copy = of_type(kind, gaussian(numel, off, size))
    need = measured(host, x, shape, rotate)
    switched = agreed(need[None])
    switched[::2] -= np.int16(off % 37)
    for exponents in (None, switched):
        out = encoded(host, x, shape, exponents, rotate)
        expected = reference.encode(copy, shape, SEED, WEIGHTS.cap, exponents, rotate)
        assert np.array_equal(out.packets[out.placement.position, 64:], expected.payload)
        assert (out.packets[:, :64] == 7).all()
        assert out.done == (True, expected.clipped)
        assert np.array_equal(need, expected.need)
        assert np.array_equal(out.exponents, expected.exponents)
        assert np.array_equal(out.scales.weights, expected.weights)
        assert exponents is None or np.array_equal(out.need, expected.need)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("rotate", [True, False])
def test_not_finite_is_seen_anywhere(rotate: bool, kind: Any) -> None:
    """In the first group, in the middle and at the very end. Rule: codec-4."""
    shape, whole = shape_for(100000, 1408), gaussian(100000)
    for value, at in itertools.product([np.nan, -np.nan, np.inf, -np.inf, 3e38], [0, 50_000, 99_999]):
        bad = whole.copy()
        bad[at] = value
        x, _ = of_type(kind, bad)
        assert not encoded(host, x, shape, None, rotate).done.finite, (value, at)
        assert finite_need(host, x, shape, Coding(SEED, rotate=rotate)) is None, (value, at)
    assert encoded(host, of_type(kind, whole)[0], shape, None, rotate).done.finite


def test_zero_is_exactly_128_and_needs_nothing() -> None:
    """Rule: codec-7."""
    shape = shape_for(100000, 1408)
    for exponents in (None, np.zeros(shape.groups, np.int16)):
        out = encoded(host, np.zeros(100000, np.float32), shape, exponents)
        assert (out.packets[:, 64:] == 128).all()
    assert (out.need == EXPONENT_NONE).all()


def test_wrong_arrays_are_refused() -> None:
    shape = shape_for(1000, 1408)
    for wrong in (np.zeros(999, np.float32), np.zeros(1000, np.float64)):
        with pytest.raises(ValueError, match="not a contiguous float32 array of 1000 entries, nor one of float16"):
            encoded(host, wrong, shape)
    out = Outputs(shape)
    packets = Packets(out.packets[:-1], out.placement.position, out.partials)
    with pytest.raises(ValueError, match="do not fit"):
        host.encode(np.zeros(1000, np.float32), shape, Coding(1), packets, out.scales, SCRATCH)


@given(st.floats(0, 2.0**119, width=32), st.sampled_from([7, 3, 1]))
def test_scales_are_the_smallest_that_hold(value: float, cap: int) -> None:
    """Rule: codec-5."""
    bits, reach = np.float32(value).view(np.uint32), np.array([value], np.float32)
    assert need_of(bits) == reference.needs(reach)
    assert own_scale(bits, cap) == reference.own_scales(reach, cap)


@pytest.mark.parametrize(
    ("ranks", "weights"),
    [(1, (7, 5)), (4, (7, 3)), (8, (7, 2)), (36, (7, 0)), (37, (3, 1)), (85, (3, 0)), (86, (1, 1)), (257, (1, 0))],
)
def test_weights_fill_the_lanes_and_no_more(ranks: int, weights: tuple[int, int]) -> None:
    """Rule: codec-6."""
    found = weights_of(ranks)
    assert found == weights
    assert 255 * ranks * found.cap << found.spare <= 65535
    assert 255 * ranks * found.cap << found.spare + 1 > 65535


def test_seeds_differ_by_job_and_op() -> None:
    assert len({seed_of(cookie, op) for cookie in range(100) for op in range(100)}) == 10000
    assert mix(0x12345678) == int(reference.fmix(np.array([0x12345678], np.uint32))[0])


@pytest.mark.parametrize("form", BITS)
def test_residual_is_what_codes_leave_unsaid(form: Bits) -> None:
    bits, shape = both_ways(form)[0], shape_for(200_001, 1408, form)
    x = gaussian(shape.numel)
    out = encoded(host, x, shape)
    expected = reference.encode(x, shape, SEED, WEIGHTS.cap)
    factor = np.repeat(scales_of(out.exponents) * out.scales.weights, shape.group_rows)
    factor *= 1 if bits == 16 else -1  # no row has many zeros
    present = np.ones(shape.rows, bool)
    said = reference.decode(expected.payload, factor, present, shape, SEED, stage=STAGE_CONTRIBUTION)
    residual = np.full(shape.numel, np.nan, np.float32)
    write_residual(x, own_rows(out), out.scales, shape, Coding(SEED), residual, SCRATCH)
    assert np.array_equal(residual, x - said)
    assert 0 < np.square(residual).sum() < 0.2 * np.square(x).sum()


@pytest.mark.parametrize("bits", [8, (4, 8)])
def test_nothing_is_kept_back_of_zeros(bits: Bits) -> None:
    """Else a group of zeros would be noise one op later."""
    x = gaussian(2 * 64 * 2816)
    x[64 * 1408 :] = 0
    shape, residual = shape_for(x.size, 1408, bits), np.full(x.size, np.nan, np.float32)
    out = encoded(host, x, shape)
    write_residual(x, own_rows(out), out.scales, shape, Coding(SEED), residual, SCRATCH)
    assert residual[: 64 * 1408].any()
    assert not residual[-64 * 1408 :].any()


# -- decode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize(("bits", "summed"), [(8, False), (8, True), (16, False)], ids=["8", "sums", "16"])
def test_decode_equals_the_reference(bits: int, summed: bool, rotate: bool) -> None:
    """Rows of the ring, own ones and missing ones, and groups of which nothing came, which are zero and counted."""
    for shape in shapes_of(704, bits):
        numel = shape.numel
        results = Results(shape, numel, 0.1, summed=summed)
        if shape.groups > 1:  # nothing came of one group
            results.source[slice(*shape.layout.rows[-2:])] = MISSING
        present, scale = results.source != MISSING, np.nan_to_num(results.scale)
        out = np.full(numel, np.nan, np.float32)
        failed = np.add.reduceat(present, shape.layout.rows[:-1]) == 0
        assert results.decoded(host_decode, out, rotate) == np.count_nonzero(failed)
        if len(results.counts):
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
        for kind in HALVES:
            half = np.full(numel, 7, kind)
            results.decoded(host_decode, half, rotate)
            assert np.array_equal(half.view(np.uint16), of_type(kind, expected)[0].view(np.uint16)), numel


def test_sources_outside_the_ring_are_refused() -> None:
    results = Results(shape_for(1000, 1408), 5, 0.0)
    for bad in (len(results.ring), own_source(len(results.own))):
        results.source[3] = bad
        with pytest.raises(ValueError, match="outside the ring"):
            results.decoded(host_decode, np.zeros(1000, np.float32), True)


PROGRAM = """
import hashlib
import numpy as np
from device_cases import Results
from tailbound.codec import decode
from tailbound.codec.shape import shape_for
out = np.zeros(100001, np.float32)
Results(shape_for(out.size, 1408), 5, 0.1).decoded(decode, out, True)
digest = hashlib.sha256(out.tobytes()).hexdigest()
"""
FRESH = """
(code,) = decode._decode.inspect_asm().values()
print(digest, code.count("mulps"), code.count("vfmadd") + code.count("vfnmadd") + code.count("vfmsub"))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="missing capability 'x86_64': names of other CPUs")
def test_another_kind_of_cpu_decodes_to_the_same_bits(tmp_path: Path) -> None:
    """Code for a machine with fused multiply-add and without AVX-512: none is used, and no bit differs."""
    here: dict[str, Any] = {}
    exec(PROGRAM, here)
    cpu = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma", "NUMBA_CACHE_DIR": str(tmp_path)}
    cpu["PYTHONPATH"] = os.pathsep.join(sys.path)
    said = subprocess.check_output([sys.executable, "-c", PROGRAM + FRESH], env=os.environ | cpu, text=True)
    digest, products, fused = said.split()
    assert digest == here["digest"]
    assert int(products) > 8
    assert int(fused) == 0


# -- halves ----------------------------------------------------------------------------------------------------------

#: every value there is
EVERY = np.arange(1 << 16, dtype=np.uint32)


def nearest(values: NDArray[np.float32], kind: Any) -> NDArray[np.uint16]:
    """Bits of the half next to each value, of two as near the even one; by numpy, and by the definition of bfloat16."""
    if kind == FLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


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


_load = loader(Packets(*NO_PACKETS))


@compiled
def _read_back(at, out):  # type: ignore[no-untyped-def]
    packets = _load(at)
    out[0], out[1], out[2] = packets.memory[1, 2], packets.position[1], packets.partials[1, 3]


def test_a_pass_reads_arrays_where_they_were_laid() -> None:
    """Also what is written to them later; but no others than it was compiled for."""
    memory, partials = np.zeros((2, 64), np.uint8), np.zeros((2, 4), np.uint64)
    packets, out = Packets(memory, np.array([5, 6], np.int32), partials), np.zeros(3, np.uint64)
    at = words_at(packets)
    memory[1, 2], partials[1, 3] = 200, 1 << 63
    _read_back(at, out)
    assert (out.tolist(), words_at(packets)) == ([200, 6, 1 << 63], at)
    for wrong in (packets._replace(position=np.zeros(2)), packets._replace(partials=partials[0])):
        with pytest.raises(ValueError, match="is none of"):
            words_at(wrong)
    with pytest.raises(ValueError, match="gaps"):
        words_at(packets._replace(memory=memory[:, ::2]))


def test_the_words_of_a_record_stay_where_a_thread_has_found_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if two threads write them at once; and a copy has words of its own."""
    packets, write, first, found = Packets(*NO_PACKETS), laid._words, iter([True]), list[int]()

    def meanwhile(value: object) -> Iterator[int]:
        if next(first, False):
            found.append(words_at(packets))  # of the other thread
        return write(value)

    monkeypatch.setattr(laid, "_words", meanwhile)
    assert [words_at(packets)] == found
    assert words_at(pickle.loads(pickle.dumps(packets))) != found[0]


def entries(values: Any) -> Entries:
    """A bucket as compiled code has it."""
    if values.dtype == FLOAT32:
        return Entries(values, np.zeros(0, np.uint16), 0)
    return Entries(np.zeros(0, np.float32), values.view(np.uint16), 1 if values.dtype == BFLOAT16 else 2)


@each_half
def test_every_half_is_read_as_it_is(kind: Any) -> None:
    group, row, bits = np.zeros(1 << 16, np.float32), np.zeros(32, np.uint16), EVERY.astype(np.uint16)
    for first, count in ((0, 1 << 16), (7, 65529), (65535, 1), (100, 15)):
        group[:] = 7
        read(entries(bits.view(kind)), first, count, group, row)
        expected = exact(bits, kind)[first : first + count]
        number = ~np.isnan(expected)
        assert np.array_equal(group[:count].view(np.uint32)[number], expected.view(np.uint32)[number])
        assert np.isnan(group[:count][~number]).all()


@each_half
def test_values_are_written_to_the_nearest_half(kind: Any) -> None:
    values, row = hard_values(), np.zeros(32, np.uint16)
    out = np.zeros(values.size + 1, kind)
    write(values, values.size, entries(out), 1, row)
    assert np.array_equal(out.view(np.uint16)[1:], nearest(values, kind))
    converted, _ = of_type(kind, values)
    assert np.array_equal(converted.view(np.uint16), out.view(np.uint16)[1:])


@each_half
def test_what_is_no_number_stays_so(kind: Any) -> None:
    values = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    converted, copy = of_type(kind, values)
    back = np.zeros(4, np.float32)
    convert(converted, back)
    for found in (copy, back):
        assert np.array_equal(found, values, equal_nan=True)


@each_half
def test_nothing_beyond_a_part_is_touched(kind: Any) -> None:
    """A bucket that is cut into ops, each of which has a slice of it."""
    memory = np.full(1000, 7, kind)
    part = memory[100:901]
    results = Results(shape_for(part.size, 1408), 4, 0.0)
    results.decoded(host_decode, part, True)
    assert (memory[:100] == 7).all()
    assert (memory[901:] == 7).all()
    assert (part != 7).all()
    clear(entries(part), 1, 5)
    assert part[0] != 0
    assert not part[1:5].any()


# -- codes of other bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_rows_fill_the_packet_at_any_number_of_bits(bits: Bits) -> None:
    shape = shape_for(10_000_000, 1408, bits)
    for way, made in zip(both_ways(bits), (shape, shape.results), strict=True):
        assert made.codes <= 1408
        assert made.codes % 16 == 0
        assert made.entries == shape.entries
        assert made.entries * way == made.codes * 8
    assert max(shape.codes, shape.results.codes) == 1408
    assert 0 <= shape.rows * shape.entries - shape.numel < 0.05 * shape.numel


def test_bits_have_numbers() -> None:
    numbers = [number_of(bits) for bits in BITS]
    assert len({*numbers}) == len(BITS)
    assert max(numbers) < 1 << 5, "a mode has five bits for it"


@pytest.mark.parametrize("wrong", [4, (8, 4), (4, 4), 8.0, "8"])
def test_other_bits_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"bits={wrong}: give one of 16, 8, (4, 8)")):
        shape_for(1000, 1408, wrong)


@pytest.mark.parametrize("bits", [16, (4, 8)])
def test_what_a_switch_cannot_sum_is_refused(bits: Bits) -> None:
    with pytest.raises(ConfigError, match="give bits=8, not"):
        check_bits(bits, switched=True)
