"""Codes over TCP, beside which benchmarks measure Tailbound, in real processes: means, alone and under DDP."""

from __future__ import annotations

import pytest

from processes import Run

pytestmark = pytest.mark.needs("torch")


def test_every_rank_gets_the_mean(run: Run) -> None:
    """An odd number of entries, gradients that grow and shrink; codes to the bit as one process makes them."""
    assert all(errors == [0.0] * 4 for errors in run("quantised_jobs.means", 4, 50_001, 4))


def test_replicas_train_as_over_gloo(run: Run) -> None:
    for apart, moved in run("quantised_jobs.training", 2):
        assert moved > 0
        assert apart < 0.1
