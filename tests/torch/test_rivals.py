"""The benchmark's rivals in real processes: means, alone and under DDP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailbound_lab.bench.rivals import RIVALS

pytestmark = pytest.mark.needs("torch")


def test_every_rank_gets_the_mean(tmp_path: Path) -> None:
    """An odd number of entries, gradients that grow and shrink; codes to the bit as one process makes them."""
    import rival_jobs
    from processes import Job

    with Job(rival_jobs.means, 4, tmp_path, 50_001, 4) as job:
        for found in job.results():
            assert set(found) == set(RIVALS)
            assert found.pop("quantised") == [0.0] * 4
            assert all(error < 1e-12 for errors in found.values() for error in errors), found


@pytest.mark.parametrize("name", ["stragglar", "quantised"])
def test_replicas_train_as_over_gloo(tmp_path: Path, name: str) -> None:
    import rival_jobs
    from processes import Job

    with Job(rival_jobs.training, 2, tmp_path, name) as job:
        for apart, moved in job.results():
            assert moved > 0
            assert apart < (0.1 if name == "quantised" else 1e-5)
