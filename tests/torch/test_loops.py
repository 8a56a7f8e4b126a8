"""Loops as people write them, and a rank that is away at every place of each: real processes over udp on loopback.

All ranks end with the same parameters, optimizer state, learning rates and extra states, after as many steps of the job
and of their schedules; or the loop is refused by name before its first step. Rules: clock-20, clock-21.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from processes import Run

pytestmark = pytest.mark.needs("torch")

#: By pause, loops of an everyday run; all others are thorough. In the first two DDP's own broadcast holds the others.
EVERYDAY = {
    "before the first": ("static", "lbfgs"),
    "after the first": ("sam", "unused"),
    "within": ("plain", "accumulating", "gan", "sam", "sparse", "joined", "following", "applying", "windowed"),
    "after an epoch": (
        "accumulating_unsynced", "clipping", "shared", "teacher", "lbfgs", "static", "compiled", "dropping"
    ),
    "evaluates": ("clipping", "gan"),
}  # fmt: skip
#: Loops that apply what the others have averaged, and those in which all ranks wait for each other in every pass: none
#: is ever lost.
APPLYING, TOGETHER = ("applying", "windowed", "dropping"), ("sparse", "joined", "unused")
#: Pauses after which a rank has missed something; only after the first epoch it knows whether batches that are left
#: there make a step.
MISSES, KNOWN = ("within", "after an epoch", "evaluates"), ("after an epoch", "evaluates")
#: What a job whose ranks come back says to a loop that it cannot have.
REFUSED = {
    "shared": "wrap a module that contains both",
    "gan": "wrap a module that contains both",
    "sparse": "come and go",
    "joined": "leave join() out",
    "unused": "find_unused_parameters=False",
}


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["some", "rest"])
@pytest.mark.parametrize("place", EVERYDAY)
def test_all_ranks_end_with_the_same_after_a_pause(run: Run, place: str, rest: bool) -> None:
    """States: lost to in step, lost to void, void to in step."""
    import loop_jobs

    loops = [name for name in loop_jobs.LOOPS if name != "dropping" or place in KNOWN]
    names = [name for name in loops if (name in EVERYDAY[place]) != rest]
    table = [(name, place) for name in names]
    parts = [table[at : at + 8] for at in range(0, len(table), 8)]  # a run has a time at which it ends
    over = [ranks for part in parts for ranks in zip(*run("loop_jobs.paused", 3, part), strict=True)]
    for name, ranks in zip(names, over, strict=True):
        first = ranks[0]
        assert all(one["well"] for one in ranks), name
        for what in ("held", "steps", "scheduled"):
            assert [one[what] for one in ranks] == [first[what]] * 3, (name, what)
        assert set(first["scheduled"]) == {loop_jobs.EPOCH * loop_jobs.EPOCHS}, name
        if place in MISSES:
            assert any(one["jumps"] for one in ranks) == (name not in (*APPLYING, *TOGETHER)), name
            assert name not in APPLYING or any(one["applied"] for one in ranks), name
            assert (len({one["made"] for one in ranks}) > 1) == (name in ("joined", "following", *APPLYING)), name


@pytest.mark.parametrize(
    "name",
    [
        "sam",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("plain", "accumulating", "accumulating_unsynced", "clipping", "lbfgs", "teacher", "static",
                         "compiled")
        ),
    ],
)  # fmt: skip
def test_ranks_that_are_killed_come_back_one_after_the_other(tmp_path: Path, name: str) -> None:
    """Also rank 0. The others go on, and wait for the dead one in few steps; sound ranks hold the same.

    Rule: clock-32. States: outside to in step.
    """
    import loop_jobs
    from processes import Job

    context = multiprocessing.get_context("forkserver")
    dead, (at, last) = context.Array("l", [-1] * 3, lock=False), (context.Value("l", n, lock=False) for n in (5, -1))
    with Job(loop_jobs.killed, 3, tmp_path, name, dead, at, last, backend="elastic") as job:
        for victim in loop_jobs.VICTIMS:
            job.processes[victim].join(60)
            job.restart(victim)
        ranks = job.results()
    assert all(one["well"] for one in ranks)
    assert [one["held"] for one in ranks] == [ranks[0]["held"]] * 3
    for number, one in enumerate(ranks):
        begun = min(one["seen"])
        assert sorted(one["seen"]) == list(range(begun, last.value)), "no step is made twice or left out"
        assert (begun > max(dead[number], 0)) == (dead[number] >= 0)
        for victim in loop_jobs.VICTIMS:
            near = (one["seen"].get(step, {"waited": ()}) for step in range(dead[victim], dead[victim] + 20))
            # in one step, unless the kernel ends the process's connections later than it has missed three
            assert sum(victim in seen["waited"] for seen in near) < 3, (number, victim)
    for step in range(last.value):
        at_once = [one["seen"][step] for one in ranks if step in one["seen"]]
        assert len({str(seen["held"]) for seen in at_once if seen["sound"]}) <= 1, step


def test_loops_that_no_rank_can_come_back_to_are_refused_by_name(run: Run) -> None:
    run("loop_jobs.barred", 2, REFUSED, backend="elastic")
