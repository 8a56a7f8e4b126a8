"""The DDP hook in real processes, against plain DDP over Gloo."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path

import pytest

from tailbound.transport.config import Config

pytestmark = pytest.mark.needs("torch")


def test_gradients_are_those_of_plain_ddp(tmp_path: Path) -> None:
    """First-iteration rebuild, several buckets, bf16, fp16, fp64, views, static graph, no_sync."""
    import torch_jobs
    from processes import Job

    with Job(torch_jobs.parity, 2, tmp_path) as job:
        for rank, stats in enumerate(job.results()):
            assert stats["rank"] == rank
            assert stats["delivered"] == 1.0
            assert set(stats["drops"]) <= {"STALE_RESULT"}  # a question may cross the end of its op
            assert stats["counters"]["ops"] > 5


def test_a_world_of_one(tmp_path: Path) -> None:
    import torch_jobs
    from processes import Job

    with Job(torch_jobs.alone, 1, tmp_path) as job:
        (stats,) = job.results()
    assert (stats["ranks"], stats["counters"], stats["delivered"], stats["history"]) == (1, {}, 1.0, [])


def test_join_with_uneven_inputs(tmp_path: Path) -> None:
    import torch_jobs
    from processes import Job

    with Job(torch_jobs.joined, 2, tmp_path) as job:
        assert min(job.results()) > 5


def test_a_rank_with_nan_abstains(tmp_path: Path) -> None:
    import torch_jobs
    from processes import Job

    with Job(torch_jobs.abstaining, 3, tmp_path) as job:
        pattern = [set(), {1}, set(), {0, 1, 2}, set(), {1}]
        assert job.results() == [[rank in ill for ill in pattern] for rank in range(3)]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    import torch_jobs
    from processes import Job

    with Job(torch_jobs.refusals, 2, tmp_path) as job:
        job.results()


def test_the_options_that_have_to_be_equal_are_those_of_the_table(repository: Path) -> None:
    """What ``test_what_cannot_be_is_refused`` lets ranks differ in is what the docs name, and no less."""
    import torch_jobs

    text = (repository / "docs" / "torch" / "hook.md").read_text()
    (named,) = re.findall(
        r"^\| other options on another rank \|.*would let replicas diverge: (.*?)\. Others", text, re.M
    )
    assert sorted(re.findall(r"`(\w+)`", named)) == sorted(torch_jobs.DIFFERING)
    of_the_hook = {"error_feedback", "resync_period"}
    of_a_key = {
        "authenticate"
    }  # ranks without the key are refused before options are compared: tests/netns/test_authenticated.py
    assert Config(0, 2).common().keys() | of_the_hook == torch_jobs.DIFFERING.keys() | of_a_key


def test_options_come_from_the_environment(tmp_path: Path) -> None:
    import torch_jobs
    from processes import Job

    with Job(torch_jobs.from_environment, 2, tmp_path) as job:
        for found in job.results():
            assert found == {
                "datapath": "udp", "ring": 4.0, "rotate": False, "deadlines": (1_500_000_000, 1_600_000_000),
                "share": False, "skip": 0.5, "bits": 16, "result": "peers",
                "patience": (5_000_000_000, 3_000_000_000, 90_500_000_000), "width": 1088,
            }  # fmt: skip


def test_ranks_with_other_buckets_are_named(tmp_path: Path) -> None:
    import torch_jobs
    from processes import Job

    with Job(torch_jobs.other_layout, 2, tmp_path) as job:
        for said in job.results():
            assert "rank 0" in said
            assert "rank 1" in said
            assert "same model" in said


def test_a_killed_worker_is_named_and_costs_the_others_a_deadline(tmp_path: Path) -> None:
    """Rule: clock-14."""
    import torch_jobs
    from processes import Job

    context = multiprocessing.get_context("forkserver")
    ready, die = context.Event(), context.Event()
    with Job(torch_jobs.killed, 3, tmp_path, 2, ready, die) as job:
        job.await_event(ready, "the last rank ready to be killed")
        job.processes[2].kill()
        for rank in (0, 1):
            texts, ended, stats = job.result(rank)
            assert len(ended) == 16
            # its end is told by its kernel: no deadline has to pass for it in three ops, but in one at most
            assert len(set(ended)) <= 2, ended
            assert any(f"rank {rank}: the process of rank 2 has ended" in text for text in texts)
            assert stats["suspects"] == [2]


def test_memory_is_what_the_docs_say(tmp_path: Path) -> None:
    """Beside plain DDP: the rings, and for every parameter packets of 1 byte and results of 4 over two ranks.

    With their headers that is 3.2 bytes; averages of their own would be 4 more.
    """
    import hook_jobs
    from processes import Job

    with Job(hook_jobs.memory, 2, tmp_path, False) as job:
        plain = max(grown for _, grown, _ in job.results())
    with Job(hook_jobs.memory, 2, tmp_path, True) as job:
        for entries, grown, rings in job.results():
            assert 2.0 < (grown - plain - rings) / entries < 3.7, (grown, plain, rings)
