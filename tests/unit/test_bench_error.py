"""``bench error``: each quantiser, mask of losses and topology against what is known of it in closed form."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tailbound.codec.local import LocalJob
from tailbound_lab.bench import error, quantisers
from tailbound_lab.bench.figures import nmse
from tailbound_lab.bench.gradients import draw, exact_mean, worst_tensor
from tailbound_lab.bench.losses import PATTERNS, lost
from tailbound_lab.bench.lossy import TOPOLOGIES, dithered, outputs, ring

#: Two groups of 64 rows of 1408 codes.
SMALL = (("all", 2 * 64 * 1408, 1.0),)
UNIFORM = PATTERNS[0]


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# -- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_gradients_have_the_variance_and_the_correlation_asked_for(correlation: float) -> None:
    a, b, c = draw((("all", 200_000, 2.0),), 3, correlation)
    assert np.std(a) == pytest.approx(2, rel=0.02)
    for x, y in ((a, b), (b, c)):
        assert np.corrcoef(x, y)[0, 1] == pytest.approx(correlation, abs=0.01)


def test_the_worst_tensor_is_the_one_furthest_off() -> None:
    layers = (("small", 4, 1.0), ("large", 4, 1.0))
    exact = np.array([1, 1, 1, 1, 10, 10, 10, 10], np.float64)
    assert worst_tensor(np.array([2, 1, 1, 1, 11, 10, 10, 10], np.float32), exact, layers) == ("small", 0.25)


# -- quantisers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [1, 2, 1000, 4096, quantisers.BLOCK + 1, 3 * quantisers.BLOCK])
def test_a_rotation_keeps_lengths_and_can_be_undone(entries: int) -> None:
    rotation, x = quantisers.Rotation(entries, np.random.default_rng(2)), normal(entries)
    y = rotation.there(x)
    assert np.linalg.norm(y) == pytest.approx(np.linalg.norm(x), rel=1e-5)
    np.testing.assert_allclose(rotation.back(y), x, atol=1e-5)


def test_the_transform_of_four_is_hadamards_matrix() -> None:
    matrix = np.stack([quantisers.hadamard(row) for row in np.eye(4, dtype=np.float32)])
    np.testing.assert_array_equal(matrix * 2, [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])


@pytest.mark.parametrize(
    ("bits", "positive"),
    # Max, Quantizing for minimum distortion, 1960, table I
    [(1, [0.7980]), (2, [0.4528, 1.510]), (3, [0.2451, 0.7560, 1.344, 2.152])],
)
def test_centroids_are_those_of_the_published_table(bits: int, positive: list[float]) -> None:
    found = quantisers.centroids(bits)
    np.testing.assert_allclose(found[len(found) // 2 :], positive, atol=6e-4)
    np.testing.assert_allclose(found, -found[::-1])


@pytest.mark.parametrize(("bits", "distortion"), [(1, 1 - 2 / math.pi), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_eden_leaves_the_error_that_its_paper_derives(bits: int, distortion: float) -> None:
    """1 / (1 - distortion) - 1 for a vector of any distribution; with one bit that is pi / 2 - 1, as in DRIVE."""
    x = normal(1 << 17) ** 3
    expected = 1 / (1 - distortion) - 1
    assert nmse(quantisers.eden(x, bits, np.random.default_rng(3)), x.astype(np.float64)) == pytest.approx(
        expected, rel=0.03
    )


def test_eden_is_unbiased() -> None:
    """The mean of many estimates of one vector has an error that falls with their number."""
    x = normal(2048)
    rng = np.random.default_rng(4)
    many = np.mean([quantisers.eden(x, 1, rng) for _ in range(200)], axis=0)
    assert nmse(many, x.astype(np.float64)) == pytest.approx((math.pi / 2 - 1) / 200, rel=0.25)


@pytest.mark.parametrize("bits", [4, 8])
def test_thc_leaves_the_error_of_stochastic_rounding_and_clamping(bits: int) -> None:
    """Independent senders: that of one, over its power."""
    gradients = [normal(1 << 17, seed=seed) for seed in range(4)]
    found = nmse(quantisers.thc_mean(gradients, bits, np.random.default_rng(5)), exact_mean(gradients))
    assert found == pytest.approx(quantisers.rounding_error(bits, quantisers.best_reach(bits)), rel=0.05)


def test_the_best_reach_is_a_minimum_within_the_range_searched() -> None:
    for bits in (2, 4, 8):
        at = quantisers.best_reach(bits)
        assert 0.5 < at < 6.9
        assert quantisers.rounding_error(bits, at) < quantisers.rounding_error(bits, at - 0.05)
        assert quantisers.rounding_error(bits, at) < quantisers.rounding_error(bits, at + 0.05)


def test_correlated_offsets_halve_the_error_of_rounding_and_do_better_where_senders_agree() -> None:
    """Of n independent senders 1/6 becomes 1/12 + 1/(12 n^2); of n equal ones 1/(6 n) becomes 1/(6 n^2)."""
    rng, ranks, bits = np.random.default_rng(6), 8, 6
    reach = quantisers.best_reach(bits)
    step = 2 * reach / (2**bits - 1)
    clamped = quantisers.rounding_error(bits, reach) - step * step / 6
    apart = [normal(1 << 16, seed=seed) for seed in range(ranks)]
    expected = clamped + step * step / 12 * (1 + 1 / ranks**2)
    assert nmse(quantisers.correlated_mean(apart, bits, rng), exact_mean(apart)) == pytest.approx(expected, rel=0.05)
    same, rngs = [normal(1 << 16)] * ranks, [np.random.default_rng(seed) for seed in range(12)]
    by_thc, by_this = (
        np.mean([nmse(mean(same, bits, each), exact_mean(same)) for each in rngs])
        for mean in (quantisers.thc_mean, quantisers.correlated_mean)
    )
    assert by_thc == pytest.approx(clamped + step * step / 6 / ranks, rel=0.15)
    assert by_this == pytest.approx(clamped + step * step / 6 / ranks**2, rel=0.15)


@pytest.mark.parametrize("mean", [quantisers.eden_mean, quantisers.thc_mean, quantisers.correlated_mean])
def test_the_mean_of_zeros_is_zero(mean: object) -> None:
    assert not mean([np.zeros(100, np.float32)] * 3, 4, np.random.default_rng(7)).any()  # type: ignore[operator]


@pytest.mark.parametrize(("bits", "ranks", "most"), [(4, 4, 6), (4, 16, 8), (8, 4, 10), (8, 16, 12)])
def test_a_sum_takes_more_bits_than_a_code(bits: int, ranks: int, most: int) -> None:
    assert error.bits_of_sum(bits, ranks) == most
    assert ranks * (2**bits - 1) < 2**most


# -- losses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burst", [1, 8])
def test_a_link_loses_its_share_in_runs_of_the_length_asked_for(burst: int) -> None:
    gone = lost(np.random.default_rng(8), 50, 4000, 0.05, burst)
    assert gone.mean() == pytest.approx(0.05, rel=0.1)
    starts = (gone[:, 1:] & ~gone[:, :-1]).sum() + gone[:, 0].sum()
    assert gone.sum() / starts == pytest.approx(burst if burst > 1 else 1 / 0.95, rel=0.1)


def test_nothing_is_lost_at_zero_and_what_cannot_be_is_refused() -> None:
    for pattern in PATTERNS:
        assert not lost(np.random.default_rng(9), 3, 100, 0.0, pattern.burst).any()
    for rate, burst in ((1.0, 1), (-0.1, 1), (0.5, 0), (0.9, 2)):
        with pytest.raises(ValueError, match="cannot lose"):
            lost(np.random.default_rng(9), 3, 100, rate, burst)


# -- topologies ----------------------------------------------------------------------------------------------------


def test_dithered_rows_leave_a_twelfth_of_the_step_squared() -> None:
    rows = normal(64, 1408)
    step = np.abs(rows).max(axis=1) / 127
    wrong = dithered(rows, np.random.default_rng(10)) - rows
    assert np.mean(wrong**2) == pytest.approx(np.mean(step**2) / 12, rel=0.02)
    assert np.abs(wrong).max() <= step.max() * 0.501
    assert not dithered(np.zeros((2, 16), np.float32), np.random.default_rng(10)).any()


def test_a_ring_without_loss_gives_every_rank_the_same_mean() -> None:
    rows, none = normal(4, 8, 64), np.zeros((3, 8), bool)
    out, present = ring(rows, none, none, np.random.default_rng(11))
    assert present.all()
    assert all((out[rank] == out[0]).all() for rank in range(4))
    np.testing.assert_allclose(out[0], rows.mean(axis=0), atol=4 * np.abs(rows).max() / 127)


def test_a_packet_that_a_ring_loses_takes_all_ranks_before_with_it() -> None:
    """Row 0 begins at rank 0: lost in the last hop, only rank 3's own part is left; in the first, three are."""
    rows = np.zeros((4, 4, 16), np.float32)
    rows[:, 0] = np.array([1, 2, 3, 4])[:, None]
    none = np.zeros((3, 4), bool)
    for hop, mean in ((0, 3.0), (1, 3.5), (2, 4.0)):
        gone = none.copy()
        gone[hop, 0] = True
        out, present = ring(rows, gone, none, np.random.default_rng(12))
        assert present.all()
        np.testing.assert_allclose(out[:, 0], mean, rtol=0.02)


def test_a_mean_that_a_ring_loses_is_missing_from_there_on() -> None:
    """Row 0 ends at rank 3 and goes on to 0, 1 and 2."""
    gone = np.zeros((3, 4), bool)
    gone[1, 0] = True
    _, present = ring(np.ones((4, 4, 16), np.float32), np.zeros((3, 4), bool), gone, np.random.default_rng(13))
    assert present[:, 0].tolist() == [True, False, False, True]
    assert present[:, 1:].all()


@pytest.mark.parametrize("rotate", [True, False])
def test_nothing_lost_is_the_codecs_own_error(rotate: bool) -> None:
    gradients = draw(SMALL, 4)
    by_codec = LocalJob(4, gradients[0].size, rotate=rotate).step(1, gradients).outputs
    for pattern in PATTERNS:
        for value, expected in zip(
            outputs("transpose", gradients, pattern, 0.0, rotate=rotate, seed=1), by_codec.values(), strict=True
        ):
            np.testing.assert_array_equal(value, expected)
    # the same sums and codes, wherever they are made
    server = outputs("parameter server", gradients, UNIFORM, 0.0, rotate=rotate, seed=1)
    np.testing.assert_array_equal(server[2], by_codec[2])


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_error_under_loss_is_what_the_counts_say(topology: str, rotate: bool) -> None:
    """Independent gradients: a row with k of N lost has the error k / (N - k), a share p of missing means p."""
    gradients, rate = draw(SMALL, 4), 0.2
    exact = exact_mean(gradients)
    expected = {"first half": 0.0, "second half": 0.0}
    if topology == "ring":
        # who is left is counted from the last loss on: k lost with probability rate * (1 - rate)^(3 - k)
        expected["first half"] = sum(rate * (1 - rate) ** (3 - k) * k / (4 - k) for k in (1, 2, 3))
        expected["second half"] = sum(1 - (1 - rate) ** hop for hop in range(4)) / 4
    else:
        # the owner's own row is not on the wire; so are 3 of 4 of the means that a rank needs
        expected["first half"] = sum(math.comb(3, k) * rate**k * (1 - rate) ** (3 - k) * k / (4 - k) for k in (1, 2, 3))
        expected["second half"] = rate * 3 / 4
    for pattern in (p for p in PATTERNS if p.name in expected):
        found = [
            nmse(value, exact)
            for seed in range(1, 7)
            for value in outputs(topology, gradients, pattern, rate, rotate=rotate, seed=seed)
        ]
        share = expected[pattern.name]
        # where groups are rotated, what is there is scaled up for what is not, and stays unbiased
        scaled = share / (1 - share) if rotate and pattern.name == "second half" and topology == "transpose" else share
        if pattern.name == "first half" or topology == "transpose" or not rotate:
            assert np.mean(found) == pytest.approx(scaled, rel=0.2)
        else:  # ranks miss different shares: the mean of s / (1 - s) is above that of s
            assert share < np.mean(found) < 2 * share


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_tables_have_a_line_for_each_case_and_a_column_for_each_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [each._replace(layers=SMALL) for each in (error._DATA[0], error._DATA[2])]
    monkeypatch.setattr(error, "_DATA", (small[0], small[0], small[1]))
    rows = error.run(tmp_path / "error.json", quick=True)
    assert json.loads((tmp_path / "error.json").read_text()) == rows
    assert {row["kind"] for row in rows} == {"quantiser", "loss"}
    assert all(row["nmse"] > 0 for row in rows)
    table = error.quantisers_table(rows)
    assert len(table) == 2 * 3  # data, bits
    assert all(
        set(line) == {"data", "bits", "ranks", *(q.name for q in error.quantisers_of(error.GAUSSIAN))} for line in table
    )
    table = error.losses_table(rows)
    assert len(table) == 2 * 2 * (1 + len(PATTERNS))  # data, rotation, no loss and the patterns of 5 %
    assert all(set(TOPOLOGIES) < set(line) for line in table)
    published = {line["paper"]: line for line in error.published_table(rows)}
    assert published["OptiReduce (NSDI'25), transpose"]["ours"] == "2.47"
    assert float(published["OptiReduce (NSDI'25), ring"]["ours"]) > 2.47
