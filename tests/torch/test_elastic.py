"""Checkpoints of plain types, and a job that goes on with another number of workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from processes import Run
from solo import without_job

pytestmark = pytest.mark.needs("torch")


def test_a_job_goes_on_with_fewer_workers(run: Run, tmp_path: Path) -> None:
    three = run("elastic_train.train", 3, tmp_path / "checkpoint.pt", 12)[0]
    two = run("elastic_train.train", 2, tmp_path / "checkpoint.pt", 8)[0]
    assert (three["begin"], two["begin"]) == (0, 12)
    assert three["history"] == []
    assert [(one["ranks"], one["ops"]) for one in two["history"]] == [(3, three["ops"])]
    # twelve clean steps, growing at 5 and 10; then three more make five
    assert three["scales"][-1] == 2.0**10
    assert two["scales"] == [2.0**10] * 2 + [2.0**11] * 5 + [2.0**12]
    before, after = three["losses"], two["losses"]
    assert sum(after) / len(after) < 0.7 * sum(before[:4]) / 4  # it goes on from where it was


def test_what_a_state_keeps() -> None:
    """Owed batches belong to one rank of one world; everything else to the job."""
    from tailbound.errors import ConfigError

    def state(rank: int, ranks: int, **counters: int) -> Any:
        return without_job(rank, ranks, SimpleNamespace(job=SimpleNamespace(counters=counters)))

    one = state(1, 3, ops=7, anything=3)
    one.owed_batches = 4
    saved = one.state_dict()
    assert saved["history"][0]["ops"] == 7
    assert "anything" not in saved["history"][0]
    for rank, ranks, owed in ((1, 3, 4), (0, 3, 0), (1, 2, 0)):
        other = state(rank, ranks, ops=5)
        other.load_state_dict(saved)
        assert other.owed_batches == owed
        assert other.state_dict()["history"][0] == saved["history"][0]
        assert [one["ops"] for one in other.state_dict()["history"]] == [7, 5]
    for wrong in ({}, {"format": 1}, saved | {"history": 3}, saved | {"format": 99}):
        with pytest.raises(ConfigError):
            state(0, 3).load_state_dict(wrong)
