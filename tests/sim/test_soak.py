"""The first part of ``make soak``: a sequence that fails is printed as a test, and time is over when it is."""

from __future__ import annotations

import signal
import time

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from sim.engine import World
from sim.test_machine import Training
from soak import machine, part
from tailbound_lab.simulate.fabric import MS


class Planted(RuleBasedStateMachine):
    """Fails where it is lifted twice, by more than ten in all."""

    world = None

    @initialize(begin=st.integers(0, 3))
    def start(self, begin: int) -> None:
        self.height = self.lifts = 0

    @rule()
    def rest(self) -> None:
        pass

    @rule(by=st.integers(0, 50))
    def lift(self, by: int) -> None:
        self.lifts += 1
        self.height += by
        assert self.lifts < 2 or self.height <= 10


class Endless(RuleBasedStateMachine):
    """Never comes to its end."""

    @rule()
    def rest(self) -> None:
        while True:
            time.sleep(0.01)


for _machine in (Planted, Endless):
    _machine.TestCase.settings = settings(
        suppress_health_check=list(HealthCheck), deadline=None, stateful_step_count=10
    )


def test_a_sequence_that_fails_is_printed_as_a_test_as_short_as_it_can_be() -> None:
    told: list[tuple[str, object]] = []
    found = machine.tried(machine.counted(Planted, lambda *what: told.append(what)), 1, 100)
    test, _, rest = found.partition("\n\n")
    assert test.splitlines() == [
        "def test_found_by_seed_1() -> None:",
        "    state = Planted()",
        "    state.start(begin=0)",
        "    state.lift(by=0)",
        "    state.lift(by=11)",
        "    state.teardown()",
    ]
    assert "self.height <= 10" in rest
    assert ("sequences", 1) in told


def test_the_engine_passes_a_few() -> None:
    counts: dict[str, float] = {}
    assert machine.tried(machine.counted(Training, lambda name, n: counts.update({name: n})), 7, 2) == ""
    assert counts["sequences"] == 1
    assert counts["virtual"] > 0


def test_time_that_is_over_ends_a_sequence_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "_told", [])
    before = signal.signal(signal.SIGALRM, part.over)
    try:
        assert machine.tried(Endless, 1, until=time.monotonic()) == ""
        assert part.is_over()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("weights", [(0, 1, 1, 1), (1, 0, 1, 1)], ids=["the one who asks", "the dead one"])
def test_a_rank_that_is_killed_is_known_as_dead_where_either_owns_no_rows(weights: tuple[int, ...]) -> None:
    """Training found it, seed 20261122000000: who owned nothing waited in ``synchronise`` for those that were killed.

    Rule: clock-15.
    """
    with World(4, 3, steps=1 << 30).start() as world:
        world.go(150 * MS)
        assert world.propose(weights)
        world.go(300 * MS)
        maps = [node.engine.maps.agreement.agreed[-1].content for node in world.alive]
        assert [tuple(content.weights) for content in maps] == [weights] * 4
        world.kill(1, 0)
        world.go(500 * MS)
        for node in world.alive:
            job = node.engine.job
            assert job.membership.dead(job.steps.own) == {1}
