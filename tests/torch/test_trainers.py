"""The real trainers over Tailbound: a rank stops, all meet in a collective of the trainer, and replicas end equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import Run

pytestmark = pytest.mark.needs("torch")


@pytest.mark.needs("transformers")
def test_transformers(run_stopped: Run, tmp_path: Path) -> None:
    """All hold while they log, evaluate and save; what is saved is what all ranks have."""
    found = run_stopped("trainer_jobs.transformers", 3, tmp_path / "out")
    for one in found:
        assert one["held"] == {"log": True, "evaluation": True, "save": True}
        assert one["options"] == (False, False, False)
        assert [text for text in one["said"] if "raise logging_steps" in text] == one["said"]
        assert one["saved"] == one["file"] == found[0]["saved"]
        assert one["rate"] == found[0]["rate"]
    assert len({one["end"] for one in found}) == 1
