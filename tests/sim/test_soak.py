"""The first part of ``make soak``: a sequence that fails is printed as a test, and time is over when it is."""

from __future__ import annotations

import signal
import time

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from sim.test_machine import Training
from soak import machine, part


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
