"""The DDP hook in real processes, against plain DDP over Gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from processes import Run
from tailbound.transport.config import Config

pytestmark = pytest.mark.needs("torch")


def test_gradients_are_those_of_plain_ddp(run: Run) -> None:
    """First-iteration rebuild, several buckets, bf16, fp16, fp64, views, static graph, no_sync."""
    for rank, stats in enumerate(run("torch_jobs.parity", 2)):
        assert stats["rank"] == rank
        assert stats["delivered"] == 1.0
        assert set(stats["drops"]) <= {"STALE_RESULT"}  # a question may cross the end of its op
        assert stats["counters"]["ops"] > 5


def test_scales_are_those_of_the_tensors_when_ddp_orders_its_bucket_anew(run: Run) -> None:
    """A bucket of the same size kept the scales of other tensors, and clipped a layer by 14 %. Rule: codec-1."""
    for errors in run("hook_jobs.rebuilt", 2):
        assert max(errors) <= 4e-3, errors


def test_a_rank_with_nan_abstains(run: Run) -> None:
    pattern = [set(), {1}, set(), {0, 1, 2}, set(), {1}]
    assert run("torch_jobs.abstaining", 3) == [[rank in ill for ill in pattern] for rank in range(3)]


def test_what_cannot_be_is_refused(run: Run) -> None:
    run("torch_jobs.refusals", 2)


def test_the_options_that_have_to_be_equal_are_those_of_the_table(repository: Path) -> None:
    """What ``test_what_cannot_be_is_refused`` lets ranks differ in is what the docs name, and no less."""
    import torch_jobs

    text = (repository / "docs" / "torch" / "options.md").read_text()
    (named,) = re.findall(
        r"^\| other options on another rank \|.*would let replicas diverge: (.*?)\. Others", text, re.M
    )
    assert sorted(re.findall(r"`(\w+)`", named)) == sorted(torch_jobs.DIFFERING)
    of_the_hook = {"error_feedback", "resync_period"}
    of_a_key = {
        "authenticate"
    }  # ranks without the key are refused before options are compared: tests/unit/test_keys.py
    assert Config(0, 2).common().keys() | of_the_hook == torch_jobs.DIFFERING.keys() | of_a_key


def test_options_come_from_the_environment(run: Run) -> None:
    for found in run("torch_jobs.from_environment", 2):
        assert found == {
            "datapath": "udp", "ring": 4.0, "deadlines": (1_500_000_000, 1_600_000_000),
            "share": False, "skip": 0.5, "bits": 16, "result": "peers",
            "patience": (5_000_000_000, 10_000_000_000, 1_000_000_000, 90_500_000_000), "width": 1088,
        }  # fmt: skip


def test_ranks_with_other_buckets_are_named(run: Run) -> None:
    for said in run("torch_jobs.other_layout", 2):
        assert "rank 0" in said
        assert "rank 1" in said
        assert "same model" in said


def test_a_killed_worker_is_named_and_costs_the_others_a_deadline(run_killed: Run) -> None:
    """Rule: clock-14."""
    for rank, (texts, ended, stats) in enumerate(run_killed("torch_jobs.killed", 3, 2)):
        assert len(ended) == 16
        # its end is told by its kernel: no deadline has to pass for it in three ops, but in one at most
        assert len(set(ended)) <= 2, ended
        assert any(f"rank {rank}: the process of rank 2 has ended" in text for text in texts)
        assert stats["suspects"] == [2]


def test_memory_is_what_the_docs_say(run: Run) -> None:
    """Beside plain DDP: the rings, and for every parameter packets of 1 byte and results of 4 over two ranks.

    With their headers that is 3.2 bytes; averages of their own would be 4 more.
    """
    plain = max(grown for _, grown, _ in run("hook_jobs.memory", 2, False))
    for entries, grown, rings in run("hook_jobs.memory", 2, True):
        assert 2.0 < (grown - plain - rings) / entries < 3.7, (grown, plain, rings)
