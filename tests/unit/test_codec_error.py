"""What the codec as a whole does to a mean: the table of NMSE, under loss too; zeros; and that it is unbiased.

All ranks run in one process (``bench.local_job``), losses are masks; 8 groups of 64 rows, and one with 64 ranks. An op
with 720,896 entries leaves its NMSE within a few per cent of the mean of many, so few are enough.

Rule: codec-17.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import pytest
from numpy.typing import NDArray

import support
from device_cases import gaussian
from tailbound.codec.scale import scales_of
from tailbound.wire.bits import Bits
from tailbound_lab.bench.local_job import LocalJob, nmse

N8 = 8 * 64 * 1408
Gradients = list[NDArray[np.float32]]


def drawn(kind: str, ranks: int, op: int, entries: int = N8) -> Gradients:
    """Independent, correlated or identical ones as ``support`` draws them; t3: of Student's distribution."""
    if kind != "t3":
        return support.gradients(kind, ranks, entries, op)
    rng = np.random.default_rng((4, op))
    heavy = (rng.standard_normal(entries) / np.sqrt(rng.standard_gamma(1.5, entries)) for _ in range(ranks))
    return [x.astype(np.float32) for x in heavy]


@lru_cache(maxsize=4)
def averaged(kind: str, ranks: int, op: int) -> tuple[Gradients, NDArray[np.float64]]:
    """Gradients of an op, of one group where ranks are many, and their mean: what is lost differs between cases."""
    found = drawn(kind, ranks, op, N8 if ranks <= 8 else N8 // 8)
    return found, support.exact_mean(found)


Mask = Callable[[LocalJob, int], dict[str, NDArray[np.bool_]]]


def mean_error(kind: str, ranks: int, ops: int, mask: Mask, bits: Bits = 8) -> float:
    job, errors = None, []
    for op in range(ops):
        gradients, exact = averaged(kind, ranks, op)
        job = job or LocalJob(ranks, exact.size, bits=bits)
        step = job.step(op, gradients, receivers=[0, 1], **mask(job, op))
        errors += [nmse(step.outputs[rank], [exact]) for rank in (0, 1)]
    return float(np.mean(errors))


def nothing(job: LocalJob, op: int) -> dict[str, NDArray[np.bool_]]:
    return {}


def lose(what: str, rate: float) -> Mask:
    def mask(job: LocalJob, op: int) -> dict[str, NDArray[np.bool_]]:
        return {what: np.random.default_rng((9, op)).random((job.world_size, job.shape.rows)) < rate}

    return mask


def dead_contributor(job: LocalJob, op: int) -> dict[str, NDArray[np.bool_]]:
    lost = np.zeros((job.world_size, job.shape.rows), bool)
    lost[-1] = True
    return {"lost_contributions": lost}


def dead_owner(job: LocalJob, op: int) -> dict[str, NDArray[np.bool_]]:
    """The last rank sends no results (and its contributions arrive)."""
    return {"lost_results": np.tile(job.placement.owner == job.world_size - 1, (job.world_size, 1))}


@cache
def lossless(kind: str, ranks: int, bits: Bits = 8) -> float:
    return mean_error(kind, ranks, 4 if ranks <= 4 else 2 if ranks == 8 else 1, nothing, bits)


@pytest.mark.parametrize(
    ("kind", "ranks", "bits", "most"),
    [
        ("U", 4, 8, 2.2e-4), ("U", 64, 8, 2.8e-4), ("C", 4, 8, 1.5e-4), ("I", 4, 8, 2.2e-4), ("I", 64, 8, 2.8e-4),
        ("t3", 4, 8, 1e-3), ("U", 4, 16, 2e-7),  # what float32 leaves
        # 0.0156 of the contributions, where the scale is as far from the best point as it can be (``codec.planes``)
        ("U", 4, (4, 8), 0.015), ("U", 16, (4, 8), 0.015),
    ],
)  # fmt: skip
def test_nothing_lost(kind: str, ranks: int, bits: Bits, most: float) -> None:
    """Rule: codec-12."""
    assert most / 100 < lossless(kind, ranks, bits) <= most


def test_the_error_hardly_grows_with_the_ranks() -> None:
    """By the coarser weights of more ranks alone (codec-6)."""
    assert lossless("U", 64) <= 1.6 * lossless("U", 4)


@pytest.mark.parametrize(
    ("kind", "mask", "least", "most"),
    [
        ("U", lose("lost_contributions", 0.001), 0, 1.5e-3),
        ("U", lose("lost_contributions", 0.05), 0, 8e-2),
        ("C", lose("lost_contributions", 0.01), 0, 5e-3),
        ("I", lose("lost_contributions", 0.05), 0, 2.2e-4),  # the lossless error: divided by the count, not by N
        ("U", lose("lost_results", 0.001), 5e-4, 2e-3),
        ("U", lose("lost_results", 0.05), 2.5e-2, 6e-2),
        ("U", dead_contributor, 0, 0.40),
        ("C", dead_contributor, 0, 0.10),
        ("I", dead_contributor, 0, 2.2e-4),
    ],
)
def test_rows_are_lost(kind: str, mask: Mask, least: float, most: float) -> None:
    """Rules: clock-9, codec-17."""
    assert least < mean_error(kind, 4, 2, mask) <= most


@pytest.mark.parametrize("ranks", [4, 64])
def test_an_owner_is_dead(ranks: int) -> None:
    assert mean_error("U", ranks, 2 if ranks < 64 else 1, dead_owner) <= 1.15 / (ranks - 1) + lossless("U", ranks)


@pytest.mark.parametrize(
    ("around", "at", "most"),
    [
        (0, slice(0), 0),
        (0, slice(12345, 12346), 1e-3),
        (0, slice(700, None, 1408), 1e-3),
        (1, slice(5000, 5064), 2.5e-3),
    ],
    ids=["all zero", "one entry", "one column", "64 values a hundred times larger"],
)
def test_zeros_and_concentrated_values(around: int, at: slice, most: float) -> None:
    """Columns of a group in which all is zero stay so, and cost no offsets (codec-10)."""
    x = around * gaussian(N8, 6)
    x[at] = 100 * gaussian(N8, 5)[at]
    job = LocalJob(1, N8)
    outs = [job.step(op, [x]).outputs[0] for op in range(5)]
    assert np.mean([support.nmse(out, x) for out in outs]) <= most
    assert not outs[0].reshape(-1, 1408)[:, ~x.reshape(-1, 1408).any(axis=0)].any()


@pytest.mark.parametrize("bits", [16, 8, (4, 8)])
def test_zeros_stay_zeros_whatever_the_scales(bits: Bits) -> None:
    """Where nothing is rotated. Rules: codec-9, codec-10."""
    ranks, entries = 32, 20_000
    gradients = [x * np.float32(2.0 ** -(rank % 8)) for rank, x in enumerate(drawn("U", ranks, 0, entries))]
    for x in gradients:
        x[::3] = 0
    out = LocalJob(ranks, entries, rotate=False, bits=bits).step(0, gradients, receivers=[0]).outputs[0]
    assert not out[::3].any()
    assert np.count_nonzero(out) > 0.6 * entries


@pytest.mark.parametrize("kind", ["U", "I"])
@pytest.mark.parametrize(
    ("ranks", "factor", "most"),
    [(4, 1e4, 2.2e-4), (4, 1e-4, 2.2e-4), (4, 128, 2.2e-4), (32, 256, 8e-4), (64, 32, 4e-3), (64, 1e4, 4e-4)],
)
def test_one_rank_of_another_size_costs_little(kind: str, ranks: int, factor: float, most: float) -> None:
    """Gradients may be of any size from one op to the next, and of one rank alone. Rules: codec-5, codec-17."""
    entries = 64 * 1408
    job, gradients = LocalJob(ranks, entries), [x.copy() for x in drawn(kind, ranks, 0, entries)]
    gradients[1] *= np.float32(factor)
    assert nmse(job.step(0, gradients, receivers=[0]).outputs[0], gradients) <= most


def test_a_tensor_keeps_its_precision_beside_one_a_thousand_times_larger() -> None:
    """In the first op, too; in groups of the large one it is noise. Rules: codec-16, codec-17."""
    tensors = (256 * 256, 64, 64 * 256, 256, 10)
    sizes = np.repeat(np.array([1.0, 1e-3, 1e-3, 1.0, 1e-3], np.float32), tensors)
    ends = np.cumsum(tensors)
    job, flat = (LocalJob(4, sum(tensors), tensors=known) for known in (tensors, ()))
    for op in range(5):
        gradients = [x * sizes for x in drawn("U", 4, op, sum(tensors))]
        exact = support.exact_mean(gradients)
        values, noise = (each.step(op, gradients, receivers=[0]).outputs[0] for each in (job, flat))
        for part in map(slice, ends - tensors, ends):
            assert nmse(values[part], [exact[part]]) < 2e-3
        assert nmse(noise[65536:65600], [exact[65536:65600]]) > 1


@pytest.mark.parametrize(
    ("ranks", "apart", "absent", "rotate", "ops"),
    [
        (5, 1, (), True, 200),
        (5, 1, (1,), True, 200),
        (5, 1, (0, 2, 3), True, 200),
        (33, 4, (), True, 60),
        (33, 4, (), False, 60),
    ],
)
def test_the_mean_is_unbiased(ranks: int, apart: int, absent: tuple[int, ...], rotate: bool, ops: int) -> None:
    """Whoever is absent, and with scales that cost bits of small ranks. Rules: codec-7, codec-9, codec-10."""
    numel = 16 * 160
    gradients = [gaussian(numel, rank, 2.0 ** (rank % apart)) for rank in range(ranks)]
    there = [x for rank, x in enumerate(gradients) if rank not in absent]
    given = [x if rank not in absent else np.full_like(x, np.nan) for rank, x in enumerate(gradients)]
    job, total, single = LocalJob(ranks, numel, rotate=rotate), np.zeros(numel), []
    for op in range(ops):
        out = job.step(op, given, receivers=[1]).outputs[1]
        single.append(nmse(out, there))
        total += out
    assert nmse((total / ops).astype(np.float32), there) < 2 * float(np.mean(single)) / ops
    assert apart > 1 or np.mean(single) < 4e-4 * np.sqrt(len(there))


@pytest.mark.parametrize("sigma", [0.71, 0.75, 0.8, 0.84])
def test_codes_of_4_bits_end_where_rounding_and_clipping_cost_little(sigma: float) -> None:
    """The scale is the one above 2.4 sigma, wherever that lies, and the error what ``codec.planes`` derives."""
    numel = 4 * 64 * 1408
    job, x = LocalJob(1, numel, bits=(4, 8)), gaussian(numel, 3, sigma)
    error = nmse(job.step(0, [x]).outputs[0], [x])
    scales = job.scales[0]
    c = float(scales_of(scales.exponents)[0]) * int(scales.weights[0]) / sigma
    assert 2.39 < c < 3.01
    tail, density = math.erfc(c / math.sqrt(2)) / 2, math.exp(-c * c / 2) / math.sqrt(2 * math.pi)
    assert error == pytest.approx((c / 7) ** 2 / 12 + 2 * ((1 + c * c) * tail - c * density), rel=0.03)
    assert error < 0.0157
