"""Ranks that are killed come back: real processes, ``kill -9``, over udp on loopback (clock-32)."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.needs("torch")

RANKS = 4


def _await(job: Any, at: Sequence[int], reached: Callable[[list[int]], bool]) -> list[int]:
    """Waits until the steps that ranks are in are as wanted; what a rank says meanwhile is an error."""
    until = time.monotonic() + 60
    while not reached(steps := list(at)):
        said = job.said()
        assert not said, said
        assert time.monotonic() < until, f"ranks are in steps {steps}"
        time.sleep(0.005)
    return steps


@pytest.fixture
def counts() -> tuple[Any, Any]:
    """Shared integers: the step that each rank is in, and the last step."""
    context = multiprocessing.get_context("forkserver")
    return context.Array("l", [-1] * RANKS, lock=False), context.Value("l", -1, lock=False)


def test_ranks_that_are_killed_come_back_one_after_the_other(tmp_path: Path, counts: tuple[Any, Any]) -> None:
    """Also rank 0. The others go on, and wait for the dead one in few steps; who comes back holds the same bits.

    States: outside to in step.
    """
    import elastic_jobs
    from processes import Job

    at, last = counts
    killed: dict[int, int] = {}
    with Job(elastic_jobs.coming_back, RANKS, tmp_path, at, last, backend="elastic") as job:
        for victim in (2, 0):
            _await(job, at, lambda steps: min(steps) >= max(killed.values(), default=0) + 40)
            job.processes[victim].kill()
            job.processes[victim].join()
            killed[victim] = at[victim]
            at[victim] = -1
            _await(job, at, lambda steps: sorted(steps)[1] >= max(killed.values()) + 20)
            job.restart(victim)
            _await(job, at, lambda steps: min(steps) >= 0)
        last.value = max(at) + 20
        results = job.results()
    assert all(result["synchronized"] for result in results)
    assert len({result["digest"] for result in results}) == 1
    for victim, step in killed.items():
        back = results[victim]
        first = min(back["seen"])
        others = [result for rank, result in enumerate(results) if rank != victim and first in result["seen"]]
        assert first > step + 20
        assert back["first"] != back["seen"][first]["state"]["digest"]
        assert back["seen"][first]["state"] in [result["seen"][first]["state"] for result in others]
    for rank, result in enumerate(results):
        mine = result["seen"]
        assert sorted(mine) == list(range(min(mine), last.value)), "no step is made twice or left out"
        for victim, step in killed.items():
            waited = [s for s in mine if step <= s < step + 20 and victim in mine[s]["waited"]]
            assert len(waited) <= 1, (rank, victim, waited)
    for step in range(last.value):
        sound = [r["seen"][step] for r in results if step in r["seen"] and r["seen"][step]["sound"]]
        assert all(one["state"] == sound[0]["state"] for one in sound), step
