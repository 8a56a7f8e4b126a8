"""Codes of 16 and 4 bits against the plain numpy reference, bit by bit, and what they do to a mean (codec-12)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from tailbound.codec import reference_bits as reference
from tailbound.codec.decode import MISSING, decode, own_source
from tailbound.codec.encode import encode, measure
from tailbound.codec.feedback import read_back, write_residual
from tailbound.codec.local import LocalJob, nmse
from tailbound.codec.mean import mean_rows
from tailbound.codec.owners import OwnerMap, place
from tailbound.codec.planes import RANKS_4, check_bits
from tailbound.codec.records import Coding, Own, Packets, Received, Scales, Sums, results
from tailbound.codec.reference import Rank, Row
from tailbound.codec.scale import cold_exponents, scales_of
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import BITS, Shape, shape_for
from tailbound.errors import ConfigError
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import EXPONENT_NONE

SCRATCH = Scratch(1408)
N8 = 8 * 64 * 1408
SIZES = [1, 1000, 40000, 100000, 721001]


def gaussian(numel: int, seed: int = 0, size: float = 1.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(numel) * size).astype(np.float32)


class Coded:
    """What one rank codes of ``x``; row order is packet order."""

    def __init__(self, x: NDArray[np.float32], shape: Shape, *, rotate: bool = True, lower: int = 0) -> None:
        self.x, self.shape, self.rotate = x, shape, rotate
        self.packets = np.zeros((shape.rows, 64 + shape.codes), np.uint8)
        self.partials = np.zeros((shape.rows, 4), np.uint64)
        self.position = np.arange(shape.rows, dtype=np.int32)
        self.need, self.shift = np.zeros(shape.groups, np.int16), np.zeros(shape.groups, np.uint8)
        self.skipped = np.zeros(shape.groups, np.uint8)
        need = np.zeros(shape.groups, np.int16)
        coding = Coding(12345, 1, 6, rotate=rotate, ranks=3)
        assert measure(x, shape, coding, need, SCRATCH)
        self.exponents = cold_exponents(need[None], 2)
        self.exponents -= np.int16(lower)
        self.memory = Packets(self.packets, self.position, self.partials)
        self.scales = Scales(self.exponents, self.need, self.shift, self.skipped)
        self.done = encode(x, shape, coding, self.memory, self.scales, SCRATCH)


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("bits", [16, 4])
def test_encode_equals_the_reference(bits: int, rotate: bool) -> None:
    for numel in SIZES:
        coded = Coded(gaussian(numel, numel, 1e-3), shape_for(numel, 1408, bits), rotate=rotate)
        expected = reference.encode(coded.x, coded.shape, 12345, 1, 6, coded.exponents, rotate, 3)
        assert coded.done == (True, 0)
        assert np.array_equal(coded.packets[:, 64:], expected.payload), numel
        assert np.array_equal(coded.need, expected.need), numel
        assert not coded.shift.any()


@pytest.mark.parametrize("bits", [16, 4])
def test_a_scale_that_is_too_small_is_taken_by_the_shift_or_clips(bits: int) -> None:
    coded = Coded(gaussian(100000), shape_for(100000, 1408, bits), lower=14)
    expected = reference.encode(coded.x, coded.shape, 12345, 1, 6, coded.exponents, ranks=3)
    assert np.array_equal(coded.packets[:, 64:], expected.payload)
    assert np.array_equal(coded.shift, expected.shift)
    assert (coded.shift.min() > 0) == (bits == 16)
    assert (coded.done.clipped > 0) == (bits == 4)


@pytest.mark.parametrize(
    ("peers", "with_own"), [(0, True), *((peers, own) for peers in (1, 3, 16) for own in (True, False))]
)
@pytest.mark.parametrize("own_shift", [0, 1])
@pytest.mark.parametrize("bits", BITS)
def test_mean_equals_the_reference(bits: int, own_shift: int, peers: int, with_own: bool) -> None:
    if bits == 4 and own_shift:
        return  # never shifted
    rng, codes, rows, e = np.random.default_rng(bits), 176, 5, -9
    low, high = {16: (0, 256), 8: (1, 256), 4: (0, 256)}[bits]
    payloads = rng.integers(low, high, (peers + 1, rows, codes)).astype(np.uint8)
    payloads[:, -1] = reference.pack(np.full(codes * 8 // bits, 1 << bits - 1), bits)  # a row of zeros
    shifts = np.zeros(peers + 1, np.uint8)
    shifts[0] = own_shift
    sums, slots = np.zeros((8, 2 * codes), np.uint8), np.zeros(8, DTYPES["tb_slot"])
    for row in range(rows):
        if peers:
            sums[row] = reference.sums_of(payloads[1:, row], shifts[1:], bits)
    slots["cookie"], slots["op"], slots["count"], slots["units"], slots["exponent"] = 1, 2, peers, peers, e
    out, own = results(rows, codes), np.zeros((rows, 64 + codes), np.uint8)
    own[:, 64:] = payloads[0]
    exponents, shift = np.full(1, e, np.int16), np.full(1, own_shift, np.uint8)
    slots["ranks"][:, 0] = (1 << peers) - 1  # ranks are 0 to 15, and 16 is the own one
    mine = Own(
        np.arange(7, 7 + rows, dtype=np.int32),
        own,
        with_own,
        Scales(exponents, exponents, shift, shift),
        exponents.copy(),
    )
    shape = Shape(rows * codes * 8 // bits, codes, 64, 1, codes, bits)  # only what a row holds is looked at
    coding = Coding(77, 16, 0, 2, ranks=17)
    made = mean_rows(Sums(sums, slots, 0, 1, 2, exponents), mine, shape, coding, out, SCRATCH)
    assert made.rows == rows
    first = 0 if with_own else 1
    units = sum(1 << int(s) for s in shifts[first:])
    members = [*range(peers), *[16] * with_own]
    for row in range(rows):
        summed = reference.sums_of(payloads[first:, row], shifts[first:], bits)
        want = reference.mean(summed, Row(7 + row, e, units, members), 77, 17, bits)
        assert np.array_equal(out.packets[row, 64:], want.payload)
        assert out.scale[row] == want.scale
    assert out.scale[-1] == 0


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("bits", [16, 4])
def test_decode_equals_the_reference(bits: int, rotate: bool) -> None:
    for numel in SIZES:
        shape, rng = shape_for(numel, 1408, bits), np.random.default_rng(numel)
        payload = rng.integers(0, 256, (shape.rows, shape.codes)).astype(np.uint8)
        scale, present = (rng.random(shape.rows) - 0.5).astype(np.float32), rng.random(shape.rows) < 0.9
        scale = np.abs(scale) if bits == 16 else scale
        own = np.zeros((shape.rows, 64 + shape.codes), np.uint8)
        own[:, 64:] = payload
        source = np.where(rng.random(shape.rows) < 0.5, np.arange(shape.rows), own_source(np.arange(shape.rows)))  # type: ignore[arg-type]
        source[~present] = MISSING
        out, ring = np.full(numel, np.nan, np.float32), np.zeros((shape.rows, 1408), np.uint8)
        ring[:, : shape.codes] = payload
        decode(Received(ring, own, source, scale), shape, Coding(99, rotate=rotate), out, SCRATCH)
        want = reference.decode(payload, scale, present, shape, 99, rotate)
        assert np.array_equal(out.view(np.uint32), want.view(np.uint32)), numel


#: (kind, bits, most): NMSE of the mean of 4 ranks. 16 bits: what float32 leaves. 4 bits: codec-17 names no bound but
#: 0.2 to 0.4 with the largest value as scale; clipping at 2.5 standard deviations has to beat that.
@pytest.mark.parametrize(("bits", "most"), [(16, 2e-7), (8, 6e-4), (4, 0.05)])
def test_error_of_the_mean(bits: int, most: float) -> None:
    job, errors = LocalJob(4, N8, bits=bits), []
    for op in range(4):
        gradients = [gaussian(N8, 10 * op + rank) for rank in range(4)]
        step = job.step(op, gradients, receivers=[0, 1])
        assert np.array_equal(step.outputs[0], step.outputs[1])
        errors.append(nmse(step.outputs[0], gradients))
    assert most / 100 < np.mean(errors) <= most


@pytest.mark.parametrize("bits", [16, 4])
def test_a_lost_contribution_costs_what_it_does_at_8_bits(bits: int) -> None:
    """The row's mean is over those that arrived; with identical gradients that is no error beyond rounding."""
    job, gradients = LocalJob(4, N8, bits=bits), [gaussian(N8)] * 4
    lost = np.random.default_rng(1).random((4, job.shape.rows)) < 0.05
    whole = nmse(job.step(0, gradients, receivers=[0]).outputs[0], gradients)
    job.exponents = None
    assert nmse(job.step(1, gradients, lost_contributions=lost, receivers=[0]).outputs[0], gradients) < 1.2 * whole


def test_all_zero_stays_exactly_zero() -> None:
    for bits in BITS:
        out = LocalJob(3, 100000, bits=bits).step(0, [np.zeros(100000, np.float32)] * 3).outputs
        assert all(not x.any() for x in out.values())


@pytest.mark.parametrize("bits", BITS)
def test_residual_is_what_codes_leave_unsaid(bits: int) -> None:
    """Of all groups but one that had no scale: of that one it is everything."""
    shape = shape_for(200_001, 1408, bits)
    coded = Coded(gaussian(shape.numel), shape, lower=4)
    coded.skipped[-1] = 1
    coded.exponents[-1] = EXPONENT_NONE
    expected = reference.encode(coded.x, shape, 12345, 1, 6, coded.exponents, ranks=3)
    factor = np.repeat(scales_of(coded.exponents + 4 * coded.shift.astype(np.int16)), shape.group_rows)
    factor *= np.where(np.repeat(coded.shift == 0, shape.group_rows) & (bits < 16), -1, 1)  # no row has many zeros
    present = np.repeat(coded.skipped == 0, shape.group_rows)
    said = reference.decode(expected.payload, factor, present, shape, 12345, rank=Rank(1, 3))
    residual = np.full(shape.numel, np.nan, np.float32)
    own = read_back(coded.memory, np.zeros(shape.rows, np.int64), np.zeros(shape.rows, np.float32))
    cuts = [0, 1, shape.groups] if shape.groups > 1 else [0, 1]
    coding = Coding(12345, 1, ranks=3)
    for part in pairwise(cuts):  # as threads share it out
        write_residual(coded.x, own, coded.scales, shape, coding, residual, SCRATCH, groups=part)
        assert np.isnan(residual).any() == (part[1] < shape.groups)
    assert np.array_equal(residual, coded.x - said)
    start = (shape.groups - 1) * shape.group_rows * shape.entries
    assert np.array_equal(residual[start:], coded.x[start:])
    assert 0 < np.square(residual[:start]).sum() < 0.2 * np.square(coded.x[:start]).sum()


@pytest.mark.parametrize("bits", [8, 4])
def test_nothing_is_kept_back_of_zeros(bits: int) -> None:
    """Else a group of zeros would be noise one op later."""
    x = gaussian(2 * 64 * 2816)
    x[64 * 1408 :] = 0
    coded = Coded(x, shape_for(x.size, 1408, bits))
    residual = np.full(x.size, np.nan, np.float32)
    shape = coded.shape
    own = read_back(coded.memory, np.zeros(shape.rows, np.int64), np.zeros(shape.rows, np.float32))
    write_residual(coded.x, own, coded.scales, shape, Coding(12345, 1, ranks=3), residual, SCRATCH)
    assert residual[: 64 * 1408].any()
    assert not residual[-64 * 1408 :].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_error_feedback_makes_the_sum_of_means_right(bits: int) -> None:
    """64 values in one place, 100 times the others: beyond 2.5 sigma, so clipped in each op; feedback says them all."""

    def run(feedback: bool) -> float:
        numel, ranks, ops = 16 * 1408, 2, 40
        job = LocalJob(ranks, numel, bits=bits)
        truth = [gaussian(numel, rank, 1e-3) for rank in range(ranks)]
        for x in truth:
            x[500:564] *= 100
        residuals = [np.zeros(numel, np.float32) for _ in truth]
        total = np.zeros(numel)
        shape = job.shape
        for op in range(ops):
            data = [x + r if feedback else x for x, r in zip(truth, residuals, strict=True)]
            if job.exponents is None:
                job.cold(data, op)
            assert job.exponents is not None
            exponents = job.exponents.copy()
            total += job.step(op, data, receivers=[0]).outputs[0]
            for rank in range(ranks):
                packets, scales = job.packets_of(rank), job.scales_of(rank)._replace(exponents=exponents[rank])
                own = read_back(packets, np.zeros(shape.rows, np.int64), np.zeros(shape.rows, np.float32))
                write_residual(data[rank], own, scales, shape, job.coding(op, rank), residuals[rank], SCRATCH)
        return nmse((total / ops).astype(np.float32), truth)

    with_feedback, without = run(True), run(False)
    if bits == 4:
        assert without > 0.1
    assert with_feedback < (0.02 if bits == 4 else without)


def test_rows_fill_the_packet_at_any_number_of_bits() -> None:
    for bits in BITS:
        shape = shape_for(10_000_000, 1408, bits)
        assert shape.codes <= 1408
        assert shape.codes % 16 == 0
        assert shape.entries * bits == shape.codes * 8
        assert shape.rows * shape.entries >= shape.numel
        assert shape.rows * shape.entries - shape.numel < 0.05 * shape.numel
        wire = shape.rows * shape.codes
        assert wire == pytest.approx(shape.numel * bits / 8, rel=0.05)


def test_what_cannot_be_summed_is_refused() -> None:
    check_bits(4, RANKS_4)
    for wrong in (
        {"bits": 4, "ranks": RANKS_4 + 1},
        {"bits": 6, "ranks": 2},
        {"bits": 4, "ranks": 2, "switched": True},
    ):
        with pytest.raises(ConfigError):
            check_bits(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="6 bits"):
        shape_for(1000, 1408, 6)
    shape = shape_for(1000, 1408, 4)
    received = Received(
        np.zeros((16, 1408), np.uint8), np.zeros((0, 64 + shape.codes), np.uint8), np.full(16, MISSING),
        np.zeros(16, np.float32), np.ones(16, np.uint16),
    )  # fmt: skip
    with pytest.raises(ValueError, match="switch"):
        decode(received, shape, Coding(1), np.zeros(1000, np.float32), SCRATCH)
    assert place(shape, OwnerMap(0, (0,)), 1).counts.sum() == shape.rows
