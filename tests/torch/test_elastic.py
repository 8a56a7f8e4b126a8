"""A checkpoint, and a job that goes on with another number of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.needs("torch")


def _run(workers: int, checkpoint: Path, steps: int, report: Path) -> dict[str, Any]:
    """What rank 0 of a job of ``elastic_train.train`` tells."""
    import elastic_train
    from processes import Job

    with Job(elastic_train.train, workers, checkpoint.parent, checkpoint, steps, report) as job:
        job.results()
    told: dict[str, Any] = json.loads(report.read_text())
    return told


def test_a_job_goes_on_with_fewer_workers(tmp_path: Path) -> None:
    checkpoint, report = tmp_path / "checkpoint.pt", tmp_path / "report.json"
    three = _run(3, checkpoint, 12, report)
    two = _run(2, checkpoint, 8, report)
    assert (three["begin"], two["begin"]) == (0, 12)
    assert [len(set(run["digests"])) for run in (three, two)] == [1, 1]
    # twelve clean steps, growing at 5 and 10; then three more make five
    assert three["scales"][-1] == 2.0**10
    assert two["scales"] == [2.0**10] * 2 + [2.0**11] * 5 + [2.0**12]
    before, after = three["losses"], two["losses"]
    assert sum(after) / len(after) < 0.7 * sum(before[:4]) / 4  # it goes on from where it was
