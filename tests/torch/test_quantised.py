"""Codes over TCP, beside which benchmarks measure Tailbound, in real processes: means, alone and under DDP."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("torch")


def test_every_rank_gets_the_mean(tmp_path: Path) -> None:
    """An odd number of entries, gradients that grow and shrink; codes to the bit as one process makes them."""
    import quantised_jobs
    from processes import Job

    with Job(quantised_jobs.means, 4, tmp_path, 50_001, 4) as job:
        assert all(errors == [0.0] * 4 for errors in job.results())


def test_replicas_train_as_over_gloo(tmp_path: Path) -> None:
    import quantised_jobs
    from processes import Job

    with Job(quantised_jobs.training, 2, tmp_path) as job:
        for apart, moved in job.results():
            assert moved > 0
            assert apart < 0.1
