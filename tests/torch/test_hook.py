"""The DDP hook: a killed worker, memory, options; most of its jobs are in ``test_jobs``."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from processes import Run
from solo import without_job
from tailbound.transport.config import Config

pytestmark = pytest.mark.needs("torch")


def test_the_options_that_have_to_be_equal_are_those_of_the_table(repository: Path) -> None:
    """What ``torch_jobs.refusals`` lets ranks differ in is what the docs name, and no less."""
    import torch_jobs

    text = (repository / "docs" / "torch" / "options.md").read_text()
    (named,) = re.findall(
        r"^\| other options on another rank \|.*would let replicas diverge: (.*?)\. Others", text, re.M
    )
    assert sorted(re.findall(r"`(\w+)`", named)) == sorted(torch_jobs.DIFFERING)
    of_the_hook = {"error_feedback", "resync_period"}
    of_a_key = {"key_file"}  # ranks without the key are refused before options are compared: tests/unit/test_keys.py
    assert Config(0, 2).common().keys() | of_the_hook == torch_jobs.DIFFERING.keys() | of_a_key


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_worker_that_ends_is_named_and_costs_the_others_a_deadline(run: Run, how: str) -> None:
    """Rule: clock-14."""
    for rank, one in enumerate(run("torch_jobs.killed", 3, 1, how, last_dies=True)):
        assert len(one["ended"]) == 16
        # its end is told by its kernel: no deadline has to pass for it in three ops, but in one at most
        assert len(set(one["ended"])) <= 2, one["ended"]
        assert any(f"rank {rank}: the process of rank 2 has ended" in text for text in one["texts"])
        assert one["suspects"] == [2]


def test_memory_is_what_the_docs_say(run: Run) -> None:
    """Beside plain DDP: the rings, and for every parameter packets of 1 byte and results of 4 over two ranks.

    With their headers that is 3.2 bytes, also while ops of two steps overlap; averages of their own would be 4 more.
    """
    plain = max(grown for _, grown, _ in run("hook_jobs.memory", 2, False))
    for entries, grown, rings in run("hook_jobs.memory", 2, True):
        assert 2.0 < (grown - plain - rings) / entries < 3.7, (grown, plain, rings)


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
