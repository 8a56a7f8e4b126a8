"""A job goes on while links slow down, break and come back, and while others use the network."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from fault_rows import contributors, same_bits
from lab_team import lab_team
from support import MS, PATIENCE, Team, gradients
from tailbound.lab.cluster import Cluster
from tailbound.lab.faults import Fault
from tailbound.lab.spec import Background
from tailbound.lab.timeline import Timeline
from tailbound.lab.topology import Link

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
Make = Callable[..., Cluster]


def op(job: Team, seed: int) -> tuple[float, bool]:
    """One all-reduce; its longest time in seconds, and whether nothing was missing. Every row is somebody's mean."""
    inputs = gradients("U", RANKS, NUMEL, seed=seed)
    begun = time.monotonic()
    results = job.allreduce(inputs)
    seconds = time.monotonic() - begun
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


def go_on(job: Team, timeline: Timeline) -> tuple[list[float], list[bool]]:
    """Ops until the timeline is through; their times, and which were whole."""
    times, complete, seed = [], [], 100
    end = time.monotonic() + PATIENCE
    with timeline:
        while not timeline.wait(0.0):
            assert time.monotonic() < end
            seconds, well = op(job, seed)
            times.append(seconds)
            complete.append(well)
            seed += 1
    return times, complete


def test_a_link_breaks_and_is_mended(tailbound_lab: Make) -> None:
    lab = tailbound_lab(workers=RANKS, rate=RATE, cables=True)
    with lab_team(lab, SETTINGS) as job:
        settle(job)
        for seed, rank in enumerate((1, 2)):
            lab.set_link(rank, False, Link.DATA)
            seconds, complete = op(job, 50 + seed)
            assert not complete
            assert seconds < (SETTINGS["start_max"] + SETTINGS["stage_max"]) / 1e9
            lab.set_link(rank, True, Link.DATA)
            settle(job)


@pytest.mark.parametrize("what", ["slower", "lossy"])
def test_a_link_gets_worse_and_better(tailbound_lab: Make, what: str) -> None:
    lab = tailbound_lab(workers=RANKS, rate=RATE, cables=True)
    timeline = Timeline(lab)
    if what == "slower":  # a two-hundredth: 0.3 s for a rank's part of one half
        timeline.rate(0.1, 1, RATE // 200, seconds=1.0, link=Link.DATA)
    else:
        timeline.faults(0.1, Fault(loss=0.3), 1, seconds=1.0, link=Link.DATA)
    with lab_team(lab, SETTINGS) as job:
        settle(job)
        times, complete = go_on(job, timeline)
        assert max(times) < 3
        settle(job)
    if what == "lossy":
        assert lab.fault_counts(1, Link.DATA).lost > 0  # repair may have brought all of it back
    else:
        assert not all(complete), "the trouble has to be felt"


def test_foreign_bursts_beside_an_allreduce(tailbound_lab: Make) -> None:
    """Bursts fill the cables again and again; ops stay bounded and right, and are whole when it is over."""
    lab = tailbound_lab(workers=RANKS, rate=RATE // 10, background=Background(RATE // 5, 60.0, 60.0), seed=4)
    with lab_team(lab, SETTINGS) as job:
        timeline = Timeline(lab).call(1.5, lambda: None)
        times, _ = go_on(job, timeline)
        assert max(times[1:]) < 3
        lab.set_background(None)
        settle(job)
    assert lab.lost_frames() > 0
