"""The hook with buckets that go the way of a device, in real processes, on host memory: all but CUDA itself.

Where not all ranks do, those that do not use the compiled passes, and the jobs demand equal bits of all ranks.
"""

from __future__ import annotations

import pytest

from processes import Run

pytestmark = pytest.mark.needs("torch")


def test_gradients_are_those_of_plain_ddp(run: Run) -> None:
    """Rebuilt buckets, several of them, all types, views, static graph, accumulation; one rank coded by the host."""
    assert [stats["delivered"] for stats in run("device_jobs.parity", 2, {1})] == [1.0, 1.0]


def test_a_device_that_fails_fails_the_backward_pass(run: Run) -> None:
    """It does not hang: futures complete, and the error says whose device it was."""
    said, _ = run("device_jobs.failing", 2)
    assert "the device is gone" in said


def test_training_and_synchronizing(run: Run) -> None:
    """The job of ``test_cuda``, so that what it asks for is known to be right."""
    for rank, result in enumerate(run("device_jobs.train", 2, "cpu", "bfloat16")):
        assert sum(result["errors"]) / len(result["errors"]) <= 4e-3
        assert result["taken"] == rank
