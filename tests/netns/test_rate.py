"""Rates over real queues: a link that falls to a twentieth and comes back; round trips by the kernel's echoes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from lab_team import lab_team
from support import Team, gradients, patient
from tailbound.kernel.net import speed_of
from tailbound.transport.pace import PaceConfig
from tailbound_lab.lab.cluster import Cluster

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

GBIT = 10**9
NUMEL = 1 << 20
Make = Callable[..., Cluster]


def ops(job: Team, count: int, seed: int) -> tuple[int, int]:
    """Rows expected and delivered in ``count`` all-reduces."""
    expected = delivered = 0
    for op in range(count):
        for _, outcome in job.allreduce(gradients("U", len(job), NUMEL, seed=seed + op % 3)):
            expected += outcome.expected
            delivered += outcome.delivered
    return expected, delivered


def traffic(job: Team, rank: int) -> dict[str, Any]:
    return job[rank].job.flow.snapshot()


def until(job: Team, found: Callable[[], bool], most: int = 60) -> None:
    """All-reduces until ``found``: one round trip, or one turn of a rate, may be that of a thread that did not run."""
    for op in range(most):
        if found():
            return
        ops(job, 1, op)
    raise AssertionError(f"not within {most} ops")


def test_the_first_op_is_no_faster_than_the_rate_that_was_given(tailbound_lab: Make) -> None:
    """Its interfaces take gigabits. A busy machine makes it slower, and nothing makes it faster."""
    rate, lab = 12.5e6, tailbound_lab(workers=2)
    assert lab.run(0, speed_of, lab.workers[0].address) == 1.25e9  # what a veth calls itself
    with lab_team(lab, patient(width=1408, ring_mib=16.0, rate=rate)) as job:
        begin = time.monotonic_ns()
        expected, delivered = ops(job, 1, 0)
        took = time.monotonic_ns() - begin
        assert delivered == expected
        assert took >= NUMEL / rate * 1e9 - PaceConfig.ahead  # a rank sends a half to be summed, and a half of the sums
        assert all(traffic(job, rank)["held_by_rate"] for rank in range(2))


def test_a_link_that_falls_to_a_twentieth_and_comes_back(tailbound_lab: Make) -> None:
    lab = tailbound_lab(workers=3, rate=10 * GBIT, wire=True)
    with lab_team(lab, patient(width=1408, ring_mib=16.0)) as job:
        expected, delivered = ops(job, 5, 0)
        assert delivered >= 0.99 * expected
        for rank in range(3):
            assert traffic(job, rank)["rtt_by"] == "kernel"
            assert traffic(job, rank)["echoes"] > 0
        lab.set_rate(2, GBIT // 2)
        ops(job, 8, 10)  # finds its rate
        expected, delivered = ops(job, 8, 20)
        assert delivered >= 0.99 * expected
        for rank in (0, 1):  # whatever stands in the queue before rank 2 is less than what its buffer holds (25 ms)
            until(job, lambda rank=rank: 0 < traffic(job, rank)["rtt_us"]["2"] < 20_000)
        lab.set_rate(2, 10 * GBIT)
        ops(job, 8, 30)
        expected, delivered = ops(job, 5, 40)
        assert delivered >= 0.99 * expected
        for rank in (0, 1):  # the rate of the narrow link does not stay
            until(job, lambda rank=rank: not 0 < traffic(job, rank)["rates"]["2"] <= 40e6)
