"""Errors that rotation spreads between tensors, and what ``bench codec`` says of them (codec-16)."""

from __future__ import annotations

import numpy as np

from tailbound_lab.bench import codec
from tailbound_lab.bench.gradients import LAYERS
from tailbound_lab.bench.local_job import LocalJob

SIZE = 64 * 256


def test_rows_that_are_lost_make_zeros_beside_them_a_little_wrong_under_rotation_only() -> None:
    """A tensor of zeros in one group with another one, a quarter of the results lost."""
    loud = np.random.default_rng(1).standard_normal(SIZE // 2, np.float32)
    gradients = [np.concatenate([np.zeros(SIZE // 2, np.float32), loud])] * 4
    lost = np.random.default_rng(2).random((4, 64)) < 0.25
    zeros = {}
    for rotate in (True, False):
        job = LocalJob(4, SIZE, 256, rotate=rotate)
        zeros[rotate] = job.step(1, gradients, lost_results=lost, receivers=[0]).outputs[0][: SIZE // 2]
    assert not zeros[False].any()
    assert 0.01 < float(np.square(zeros[True]).mean()) < 0.5  # beside a tensor of variance one


def test_the_worst_tensor_is_told_beside_the_error_of_all() -> None:
    """No tensor is much worse than all together, however small it is beside its neighbours (codec-16)."""
    every = codec.errors()
    rows = {row["name"]: row for row in every}
    assert {row["worst_tensor"] for row in rows.values()} <= {name for name, _, _ in LAYERS}
    for name in ("rotated", "plain"):
        row = rows[f"{name}, 0% of results lost"]
        assert row["nmse"] < row["worst_nmse"] < 1e-3
    found = {(r["bits"], r["ranks"], r["correlation"]): r["nmse"] for r in every if r["name"].startswith("rotated")}
    for bits in (8, "4,8"):  # fewer bits cost, ranks that agree win
        assert found[bits, 16, 0.5] < 0.8 * found[bits, 16, 0.0]
        assert found[bits, 4, 0.5] < found[bits, 4, 0.0]
    assert found["4,8", 16, 0.5] > 10 * found[8, 16, 0.5]
