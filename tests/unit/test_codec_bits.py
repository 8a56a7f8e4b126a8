"""Codes of 16 and 4 bits against the plain numpy reference, bit by bit, and what they do to a mean (codec-12)."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

import reference
from reference import Rank, Row
from tailbound.codec.decode import MISSING, decode
from tailbound.codec.encode import encode, measure
from tailbound.codec.feedback import read_back, write_residual
from tailbound.codec.format import check_bits
from tailbound.codec.mean import mean_rows
from tailbound.codec.owners import OwnerMap, place
from tailbound.codec.records import Coding, Own, Packets, Received, Scales, Sums, results
from tailbound.codec.scale import cold_exponents, scales_of
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import Shape, shape_for
from tailbound.errors import ConfigError
from tailbound.wire.bits import BITS, Bits, as_bits, bits_numbered, both_ways, number_of
from tailbound.wire.packets import DTYPES
from tailbound_lab.bench.local_job import LocalJob, nmse

SCRATCH = Scratch(1408)
N8 = 8 * 64 * 1408


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
        need = np.zeros(shape.groups, np.int16)
        coding = Coding(12345, 1, 6, rotate=rotate, ranks=3)
        assert measure(x, shape, coding, need, SCRATCH)
        self.exponents = cold_exponents(need[None], 2)
        self.exponents -= np.int16(lower)
        self.memory = Packets(self.packets, self.position, self.partials)
        self.scales = Scales(self.exponents, self.need, self.shift)
        self.done = encode(x, shape, coding, self.memory, self.scales, SCRATCH)


@pytest.mark.parametrize("bits", [16, (4, 8)])
def test_a_scale_that_is_too_small_is_taken_by_the_shift_or_clips(bits: Bits) -> None:
    coded = Coded(gaussian(100000), shape_for(100000, 1408, bits), lower=14)
    expected = reference.encode(coded.x, coded.shape, 12345, 1, 6, coded.exponents, ranks=3)
    assert np.array_equal(coded.packets[:, 64:], expected.payload)
    assert np.array_equal(coded.shift, expected.shift)
    assert (coded.shift.min() > 0) == (bits == 16)
    assert (coded.done.clipped > 0) == (bits != 16)


@pytest.mark.parametrize(
    ("peers", "with_own"), [(0, True), *((peers, own) for peers in (1, 3, 16) for own in (True, False))]
)
@pytest.mark.parametrize("own_shift", [0, 1])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_mean_equals_the_reference(bits: int, own_shift: int, peers: int, with_own: bool) -> None:
    if bits == 4 and own_shift:
        return  # never shifted
    rng, codes, rows, e = np.random.default_rng(bits), 176, 5, -9
    low, high = {16: (0, 256), 8: (1, 256), 4: (0, 256)}[bits]
    payloads = rng.integers(low, high, (peers + 1, rows, codes)).astype(np.uint8)
    payloads[:, -1] = reference.pack(np.full(codes * 8 // bits, 1 << bits - 1), bits)  # a row of zeros
    shifts = np.zeros(peers + 1, np.uint8)
    shifts[0] = own_shift
    shape = Shape(rows * codes * 8 // bits, codes, 64, codes, bits)  # only what a row holds counts
    sums, slots = np.zeros((8, (4 if bits == 4 else 2) * codes), np.uint8), np.zeros(8, DTYPES["tb_slot"])
    for row in range(rows):
        if peers:
            sums[row] = reference.sums_of(payloads[1:, row], shifts[1:], bits)
    slots["cookie"], slots["op"], slots["count"], slots["units"], slots["exponent"] = 1, 2, peers, peers, e
    out, own = results(rows, shape.results.codes), np.zeros((rows, 64 + codes), np.uint8)
    own[:, 64:] = payloads[0]
    exponents, shift = np.full(1, e, np.int16), np.full(1, own_shift, np.uint8)
    slots["ranks"][:, 0] = (1 << peers) - 1  # ranks are 0 to 15, and 16 is the own one
    mine = Own(
        np.arange(7, 7 + rows, dtype=np.int32),
        own,
        with_own,
        Scales(exponents, exponents, shift),
        exponents.copy(),
    )
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


#: (bits, ranks, most): NMSE of the mean. 16 bits: what float32 leaves. 4 bits: 0.0146 of the contributions, where the
#: exponent is as far from the best point as it can be (``codec.planes``).
@pytest.mark.parametrize(
    ("bits", "ranks", "most"), [(16, 4, 2e-7), (8, 4, 6e-4), ((4, 8), 4, 0.015), ((4, 8), 16, 0.015)]
)
def test_error_of_the_mean(bits: Bits, ranks: int, most: float) -> None:
    numel = 4 * N8 // ranks
    job, errors = LocalJob(ranks, numel, bits=bits), []
    for op in range(4):
        gradients = [gaussian(numel, 100 * op + rank) for rank in range(ranks)]
        step = job.step(op, gradients, receivers=[0, 1])
        assert np.array_equal(step.outputs[0], step.outputs[1])
        errors.append(nmse(step.outputs[0], gradients))
    assert most / 100 < np.mean(errors) <= most


@pytest.mark.parametrize("sigma", [0.71, 0.75, 0.8, 0.84])
def test_codes_of_4_bits_end_where_rounding_and_clipping_cost_little(sigma: float) -> None:
    """The scale is the exponent above 2.4 sigma, wherever that lies, and the error what ``codec.planes`` derives."""
    numel = 4 * 64 * 1408
    job, x = LocalJob(1, numel, bits=(4, 8)), gaussian(numel, 3, sigma)
    error = nmse(job.step(0, [x]).outputs[0], [x])
    assert job.exponents is not None
    c = float(scales_of(job.exponents[0])[0]) / sigma
    assert 2.39 < c < 2.87
    tail, density = math.erfc(c / math.sqrt(2)) / 2, math.exp(-c * c / 2) / math.sqrt(2 * math.pi)
    assert error == pytest.approx((c / 7) ** 2 / 12 + 2 * ((1 + c * c) * tail - c * density), rel=0.03)
    assert error < 0.015


def test_clipping_makes_the_mean_shorter_and_hardly_turns_it() -> None:
    """By 2 Q(c), c standard deviations being the scale, with a rank absent, too; signs are others in each op."""
    numel, ops = 40_000, 60
    job, total = LocalJob(4, numel, bits=(4, 8)), np.zeros(numel)
    gradients = [gaussian(numel, rank) for rank in range(4)]
    lost = np.zeros((4, job.shape.rows), bool)
    lost[1] = job.placement.owner != 1
    for op in range(ops):
        total += job.step(op, gradients, lost_contributions=lost, receivers=[0]).outputs[0] / ops
    assert job.exponents is not None
    c = float(scales_of(job.exponents[0])[0])
    # what the rank that is missing has in its own rows is rotated into every entry
    absent = np.mean([gradients[i] for i in (0, 2, 3)], axis=0)
    truth = 0.75 * absent + 0.25 * np.mean(gradients, axis=0)
    gain = float(total @ truth) / float(truth @ truth)
    assert gain == pytest.approx(math.erf(c / math.sqrt(2)), abs=0.005)
    assert np.square(total / gain - truth).sum() / np.square(truth).sum() < 1.5e-3  # a tenth of one op's error


@pytest.mark.parametrize("form", BITS)
def test_residual_is_what_codes_leave_unsaid(form: Bits) -> None:
    bits, shape = both_ways(form)[0], shape_for(200_001, 1408, form)
    coded = Coded(gaussian(shape.numel), shape, lower=4)
    expected = reference.encode(coded.x, shape, 12345, 1, 6, coded.exponents, ranks=3)
    factor = np.repeat(scales_of(coded.exponents + 4 * coded.shift.astype(np.int16)), shape.group_rows)
    factor *= np.where(np.repeat(coded.shift == 0, shape.group_rows) & (bits < 16), -1, 1)  # no row has many zeros
    said = reference.decode(expected.payload, factor, np.ones(shape.rows, bool), shape, 12345, rank=Rank(1, 3))
    residual = np.full(shape.numel, np.nan, np.float32)
    own = read_back(coded.memory, np.zeros(shape.rows, np.int64), np.zeros(shape.rows, np.float32))
    cuts = [0, 1, shape.groups] if shape.groups > 1 else [0, 1]
    coding = Coding(12345, 1, ranks=3)
    for part in pairwise(cuts):  # as threads share it out
        write_residual(coded.x, own, coded.scales, shape, coding, residual, SCRATCH, groups=part)
        assert np.isnan(residual).any() == (part[1] < shape.groups)
    assert np.array_equal(residual, coded.x - said)
    assert 0 < np.square(residual).sum() < 0.2 * np.square(coded.x).sum()


@pytest.mark.parametrize("bits", [8, (4, 8)])
def test_nothing_is_kept_back_of_zeros(bits: Bits) -> None:
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


@pytest.mark.parametrize("bits", [8, (4, 8)])
def test_error_feedback_makes_the_sum_of_means_right(bits: Bits) -> None:
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
    if bits != 8:
        assert without > 0.1
    assert with_feedback < (without if bits == 8 else 0.02)


def test_rows_fill_the_packet_at_any_number_of_bits() -> None:
    for bits in BITS:
        shape = shape_for(10_000_000, 1408, bits)
        for way, made in zip(both_ways(bits), (shape, shape.results), strict=True):
            assert made.codes <= 1408
            assert made.codes % 16 == 0
            assert made.entries == shape.entries
            assert made.entries * way == made.codes * 8
            assert made.rows * made.codes == pytest.approx(made.numel * way / 8, rel=0.05)
        assert max(shape.codes, shape.results.codes) == 1408
        assert shape.rows * shape.entries >= shape.numel
        assert shape.rows * shape.entries - shape.numel < 0.05 * shape.numel


def test_what_cannot_be_summed_is_refused() -> None:
    for bits in BITS:
        check_bits(bits)
        assert bits_numbered(number_of(bits)) == bits
    assert len({number_of(bits) for bits in BITS}) == len(BITS)
    with pytest.raises(ConfigError, match="no bits"):
        bits_numbered(7)
    assert as_bits([4, 8]) == (4, 8)  # from JSON; what ranks and coders compare is a tuple
    assert both_ways([4, 8]) == both_ways((np.int64(4), 8)) == (4, 8)  # type: ignore[arg-type]
    assert both_ways(np.int64(8)) == (8, 8)  # type: ignore[arg-type]
    for wrong in (4, (8, 4), (4, 4), 8.0, "8"):
        with pytest.raises(ConfigError, match=re.escape(f"bits={wrong}: give one of 16, 8, (4, 8)")):
            check_bits(wrong)
        with pytest.raises(ConfigError, match="give one of"):
            shape_for(1000, 1408, wrong)
    for unsummed in (16, (4, 8)):
        with pytest.raises(ConfigError, match="give bits=8, not"):
            check_bits(unsummed, switched=True)
    shape = shape_for(1000, 1408, 16)
    received = Received(
        np.zeros((16, 1408), np.uint8), np.zeros((0, 64 + shape.codes), np.uint8), np.full(16, MISSING),
        np.zeros(16, np.float32), np.ones(16, np.uint16),
    )  # fmt: skip
    with pytest.raises(ValueError, match="switch"):
        decode(received, shape, Coding(1), np.zeros(1000, np.float32), SCRATCH)
    assert place(shape, OwnerMap(0, (0,)), 1).counts.sum() == shape.rows
