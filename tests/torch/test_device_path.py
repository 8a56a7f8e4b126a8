"""The hook with buckets that go the way of a device, in real processes, on host memory: all but CUDA itself.

Where not all ranks do, those that do not use the compiled passes, and the jobs demand equal bits of all ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("torch")


def test_gradients_are_those_of_plain_ddp(tmp_path: Path) -> None:
    """Rebuilt buckets, several of them, all types, views, static graph, accumulation; one rank coded by the host."""
    import device_jobs
    from processes import Job

    with Job(device_jobs.as_device, 2, tmp_path, "parity", {1}) as job:
        assert [stats["delivered"] for stats in job.results()] == [1.0, 1.0]


def test_a_world_of_one(tmp_path: Path) -> None:
    import device_jobs
    from processes import Job

    with Job(device_jobs.as_device, 1, tmp_path, "alone", {0}) as job:
        assert [stats["ranks"] for stats in job.results()] == [1]


def test_a_rank_with_nan_abstains(tmp_path: Path) -> None:
    import device_jobs
    from processes import Job

    with Job(device_jobs.as_device, 3, tmp_path, "abstaining", {0, 1}) as job:
        pattern = [set(), {1}, set(), {0, 1, 2}, set(), {1}]
        assert job.results() == [[rank in ill for ill in pattern] for rank in range(3)]


def test_a_stopped_rank_applies_what_the_others_have_finished(tmp_path: Path) -> None:
    import device_jobs
    from processes import Job

    context = multiprocessing.get_context("forkserver")
    ready, moved = context.Event(), context.Event()
    with Job(device_jobs.as_device, 3, tmp_path, "stopped", {2}, 2, 8.0, 10, 60, ready, moved) as job:
        job.await_event(ready, "the last rank about to stop")
        job.await_event(moved, "the others some steps further")
        os.kill(job.processes[2].pid, signal.SIGCONT)
        back = job.results()[2]
    applied = back["stats"]["counters"]["steps_applied"]
    assert applied >= 9
    assert len(back["computed"]) + applied == 60
    assert len({digest for digest, _, synchronised in back["digests"] if synchronised}) == 1


def test_codes_of_any_bits_and_error_feedback(tmp_path: Path) -> None:
    """One rank coded by the host: both decode to the same bits, and go over from 16 bits to 8 at the same step."""
    import device_jobs
    from processes import Job

    with Job(device_jobs.as_device, 2, tmp_path, "any_bits", {1}) as job:
        for errors in job.results():
            assert max(errors["16"]) < 1e-6
            assert max(errors["fine"][:2]) < 1e-6 < min(errors["fine"][2:])
            assert max(errors["8"]) < 8e-3
            assert max(errors["4"]) < 0.4
            assert sum(errors["4,8"]) < 0.7 * sum(errors["4"])
    for way in (device_jobs.as_device, device_jobs.copied):
        with Job(way, 2, tmp_path, "feedback", {0}) as job:
            for found in job.results():
                assert found["with"] < found["without"] / 4


def test_a_device_without_kernels_copies_its_buckets_to_the_host(tmp_path: Path) -> None:
    """All types, several buckets, accumulation; one rank whose buckets lie on the host."""
    import device_jobs
    from processes import Job

    with Job(device_jobs.copied, 2, tmp_path, "parity", {1}) as job:
        assert [stats["delivered"] for stats in job.results()] == [1.0, 1.0]


def test_a_device_that_fails_fails_the_backward_pass(tmp_path: Path) -> None:
    """It does not hang: futures complete, and the error says whose device it was."""
    import device_jobs
    from processes import Job

    with Job(device_jobs.failing, 2, tmp_path) as job:
        said, _ = job.results()
    assert "the device is gone" in said


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "float64"])
def test_training_and_synchronising(tmp_path: Path, kind: str) -> None:
    """The job of ``test_cuda``, so that what it asks for is known to be right."""
    import device_jobs
    from processes import Job

    with Job(device_jobs.train, 2, tmp_path, "cpu", kind) as job:
        for rank, result in enumerate(job.results()):
            assert sum(result["errors"]) / len(result["errors"]) <= 4e-3
            assert result["taken"] == rank
