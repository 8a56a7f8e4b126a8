"""Jobs beside each other and beside TCP, at shallow queues that mark (clock-24)."""

from __future__ import annotations

import random

import pytest

from sim.neighbours import share
from tailbound_lab.simulate.ports import Switching
from tailbound_lab.simulate.world import World

MARKING = Switching(rate=100_000_000, buffer=64 << 10, mark=16 << 10)
SIZE = 256 << 10


def test_a_flow_of_tcp_and_a_job_leave_each_other_half() -> None:
    """A fair share is half of the link: TCP keeps half of that at least, and the job its own, but for a tenth."""
    alone = share(3, SIZE, MARKING, warm=0.1, seconds=0.2)
    beside = share(3, SIZE, MARKING, tcp=1, ecn=True, warm=0.4, seconds=0.5)
    assert beside.tcp[0] >= 0.25
    assert beside.ops[0] >= 0.45 * alone.ops[0]
    assert beside.dropped <= 0.001 * beside.packets


def test_two_jobs_get_equal_parts() -> None:
    jain = share(3, SIZE, MARKING, jobs=2, warm=0.2, seconds=0.4).jain
    assert jain is not None
    assert jain >= 0.95


def test_many_ranks_that_wait_for_a_core_ask_each_other_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow has one row or two, and an op takes most of a second: who is late is not asked every 20 ms for it.

    Seeds have 0.25 to 0.38 questions a row.
    """
    dice = random.Random(1)

    def wait(world: World) -> int:
        return int(dice.expovariate(1 / 60e6)) if dice.random() < 0.3 else 0

    monkeypatch.setattr(World, "waits_for_a_core", wait)
    beside = share(24, 128 << 10, MARKING, apart=10_000_000, warm=0.8, seconds=2.0)
    assert beside.delivered == beside.expected > 0
    rows = beside.kinds["contribution"] + beside.kinds["result"]
    questions = beside.kinds["ready"] + beside.kinds["repair"]  # of either half; GONE answers
    assert 0 < questions < 0.5 * rows
