"""A job goes on while others fill its links; links that slow down, break and come back: ``test_faults_pairs.py``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from fault_rows import contributors, same_bits
from lab_team import lab_team
from support import MS, PATIENCE, Team, gradients
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import Background
from tailbound_lab.lab.timeline import Timeline

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

RANKS, WIDTH = 3, 1408
NUMEL = 192 * WIDTH
RATE = 1_000_000_000
SETTINGS: dict[str, Any] = {
    "width": WIDTH,
    "ring_mib": 8.0,
    "rotate": False,
    "deadline_1": 200 * MS,
    "deadline_2": 200 * MS,
    "stage_max": 5000 * MS,
    "start_max": 2000 * MS,
    "quiet": 5 * MS,
}
#: Seconds that an op may take where threads have to wait for a core now and then: it ends by its deadlines, soon after
#: its clock has started, and not with its stages.
HELD_MOST = (SETTINGS["start_max"] + SETTINGS["stage_max"]) / 1e9
Make = Callable[..., Cluster]


def op(job: Team, seed: int) -> tuple[float, bool]:
    """One all-reduce; its longest time in seconds, and whether nothing was missing. Every row is somebody's mean."""
    inputs = gradients("U", RANKS, NUMEL, seed=seed)
    results = job.allreduce(inputs)
    seconds = max(outcome.nanoseconds for _, outcome in results) / 1e9
    for out, outcome in results:
        assert outcome.error is None
        contributors(out, inputs, set(range(RANKS)), WIDTH)
        same_bits(out, results[0][0], WIDTH)
    return seconds, all(outcome.delivered == outcome.expected for _, outcome in results)


def settle(job: Team, most: int = 12) -> None:
    """Until an op is whole."""
    for seed in range(most):
        if op(job, seed)[1]:
            return
    raise AssertionError(f"still incomplete after {most} ops")


def go_on(job: Team, timeline: Timeline) -> list[float]:
    """Ops until the timeline is through, and two at least; their times but that of the first, which settles scales."""
    times: list[float] = []
    end = time.monotonic() + PATIENCE
    with timeline:
        while not timeline.wait(0.0) or len(times) < 2:
            assert time.monotonic() < end
            times.append(op(job, 100 + len(times))[0])
    return times[1:]


def test_foreign_bursts_beside_an_allreduce(tailbound_lab: Make) -> None:
    """Bursts fill the cables again and again; ops stay bounded and right, and are whole when it is over."""
    lab = tailbound_lab(workers=RANKS, rate=RATE // 10, background=Background(RATE // 5, 60.0, 60.0), seed=4)
    with lab_team(lab, SETTINGS) as job:
        timeline = Timeline(lab).call(1.5, lambda: None)
        assert max(go_on(job, timeline)) < HELD_MOST
        lab.set_background(None)
        settle(job)
    assert lab.lost_frames() > 0
