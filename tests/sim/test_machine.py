"""Any sequence of faults: a stateful test of the real engine in virtual time.

The same few sequences are tried every time. ``make soak`` tries others for as long as it is told, makes one that fails
as short as it can, and prints it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sim.engine import World, switch_of
from tailbound_lab.simulate.fabric import MS, Terms

TERMS = [Terms(), Terms(rate=1e7, room=8 << 10), Terms(queue=64 << 10), Terms(jitter=5 * MS)]
NUMBERS = st.integers(0, 4)
LENGTHS = st.sampled_from([5, 40, 250, 1500])


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """Thousands of warnings of silent ranks say nothing here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Watched(World):
    """Checked in every turn."""

    every = 1


class Training(RuleBasedStateMachine):
    """A job whose ranks are stopped, cut off, slowed down, killed and back again while its network loses packets."""

    @initialize(
        ranks=st.integers(2, 5),
        seed=st.integers(0, 1000),
        terms=st.sampled_from(TERMS),
        share_rows=st.booleans(),
        paced=st.sampled_from([0.0, 3e6]),
        switched=st.sampled_from([False, False, True]),
    )
    def begin(self, ranks: int, seed: int, terms: Terms, share_rows: bool, paced: float, switched: bool) -> None:
        switch = switch_of(ranks) if switched else None
        made = Watched(ranks, seed, terms, steps=1 << 30, paced=paced, switch=switch, share_rows=share_rows)
        self.world = made.start()

    def _one(self, number: int) -> int:
        alive = self.world.alive
        return alive[number % len(alive)].rank

    @property
    def _dead(self) -> list[int]:
        return [node.rank for node in self.world.nodes if node.dead]

    @rule(length=st.sampled_from([3, 30, 200, 700]))
    def go_on(self, length: int) -> None:
        self.world.go(length * MS)

    @rule(loss=st.sampled_from([0.0, 0.01, 0.1, 0.5]), burst=st.sampled_from([0.0, 8.0]))
    def lose(self, loss: float, burst: float) -> None:
        self.world.lose(loss, burst)

    @rule(number=NUMBERS, length=LENGTHS)
    def stop(self, number: int, length: int) -> None:
        self.world.stop(self._one(number), 0, length * MS)

    @rule(number=NUMBERS, cut=st.booleans())
    def cut(self, number: int, cut: bool) -> None:
        self.world.change(self._one(number), 0, cut=cut)

    @rule(number=NUMBERS, speed=st.sampled_from([0.02, 0.3, 1.0]))
    def slow_down(self, number: int, speed: float) -> None:
        self.world.change(self._one(number), 0, speed=speed)

    @rule(number=NUMBERS, length=LENGTHS)
    def hold(self, number: int, length: int) -> None:
        """Before its next step."""
        self.world.nodes[self._one(number)].pause = length * MS

    @rule(number=NUMBERS, length=LENGTHS)
    def leave_and_jump(self, number: int, length: int) -> None:
        """Before its next step it does nothing for a while, and goes on where the others are then."""
        self.world.nodes[self._one(number)].away = length * MS

    @rule(owners=st.sets(st.integers(0, 4)))
    def propose_a_map(self, owners: set[int]) -> None:
        chosen = tuple(sorted(owners.intersection(range(self.world.ranks))))
        if chosen:
            self.world.propose(chosen)

    @precondition(lambda self: len(self.world.alive) > 2)
    @rule(number=NUMBERS)
    def kill(self, number: int) -> None:
        self.world.kill(self._one(number), 0)

    @precondition(lambda self: self._dead)
    @rule(number=NUMBERS)
    def come_back(self, number: int) -> None:
        self.world.revive(self._dead[number % len(self._dead)])

    @precondition(lambda self: self.world.switch is not None)
    @rule(length=st.sampled_from([0, 40, 700]))
    def restart_the_switch(self, length: int) -> None:
        self.world.restart_switch(length * MS)

    def teardown(self) -> None:
        """Everything is mended, and three steps later everybody is through."""
        if not hasattr(self, "world"):
            return
        with self.world as world:
            world.lose(0.0, 0.0)
            for node in world.alive:
                world.change(node.rank, 0, speed=1.0, cut=False)
            world.steps = max(node.step for node in world.alive) + 3
            world.finish()


Training.TestCase.settings = settings(
    max_examples=9,
    stateful_step_count=10,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTraining = pytest.mark.timeout(300)(Training.TestCase)


# -- the first part of ``make soak`` runs, and a failure that it has found stays mended --------------------------------


def test_the_engine_passes_a_few() -> None:
    from soak import machine  # which imports this file

    counts: dict[str, float] = {}
    assert machine.tried(machine.counted(Training, lambda name, n: counts.update({name: n})), 7, 2) == ""
    assert counts["sequences"] == 1
    assert counts["virtual"] > 0


@pytest.mark.parametrize("owners", [(1, 2, 3), (0, 2, 3)], ids=["the one who asks", "the dead one"])
def test_a_rank_that_is_killed_is_known_as_dead_where_either_owns_no_rows(owners: tuple[int, ...]) -> None:
    """Training found it, seed 20261122000000: who owned nothing waited in ``synchronize`` for those that were killed.

    Rule: clock-15.
    """
    with World(4, 3, steps=1 << 30).start() as world:
        world.go(150 * MS)
        assert world.propose(owners)
        world.go(300 * MS)
        maps = [node.engine.maps.agreement.agreed[-1].map for node in world.alive]
        assert [each.owners for each in maps] == [owners] * 4
        world.kill(1, 0)
        world.go(500 * MS)
        for node in world.alive:
            job = node.engine.job
            assert job.membership.dead(job.steps.own) == {1}
