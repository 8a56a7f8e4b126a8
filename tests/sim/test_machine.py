"""The real engine in virtual time, with losses, and with any sequence of faults.

``sim.engine`` checks bounds, acknowledgements, equal bits and books. Rules: clock-7b, clock-12, clock-19, kernel-21.

The same few sequences are tried every time. ``make soak`` tries others for as long as it is told, makes one that fails
as short as it can, and prints it.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sim.engine import Plan, World, switch_of
from tailbound.wire.schema import Found
from tailbound_lab.simulate.fabric import MS, S, Terms

#: Losses one by one and in bursts; sockets so small that results wait for room, at a tenth of the usual rate.
UNIFORM = Terms(loss=0.02)
BURSTS = Terms(loss=0.02, burst=5)
NARROW = Terms(loss=0.02, burst=5, room=8 << 10, rate=1e7)


@pytest.mark.parametrize(("ranks", "steps"), [(1, 20), (2, 20), (5, 20), (24, 2)])
def test_where_nothing_is_lost_every_row_arrives(ranks: int, steps: int) -> None:
    with World(ranks, seed=ranks, steps=steps) as world:
        world.run()
    assert (world.counts["delivered"], world.counts["compared"]) == (world.counts["expected"], ranks * 2 * steps)
    assert not any(world.fabric.dropped.values())
    assert all(len(node.over) == 2 * steps for node in world.nodes)


@pytest.mark.parametrize(
    ("terms", "seed"),
    [
        pytest.param(terms, seed, marks=[] if seed == everyday else [pytest.mark.thorough], id=f"{name}-{seed}")
        for name, terms, everyday in (("uniform", UNIFORM, 0), ("bursts", BURSTS, 1), ("narrow", NARROW, 0))
        for seed in range(4)
    ],
)
def test_losses_are_repaired_within_the_bound(terms: Terms, seed: int) -> None:
    with World(4, seed, terms, steps=40, paced=3e6 * (terms is UNIFORM)) as world:
        world.run()
    assert world.fabric.dropped["loss"] > 0
    assert not any(node.engine.job.queue.said.stale for node in world.nodes), "last rows leave twice, or once"
    assert any(node.engine.job.queue.said.waits for node in world.nodes) == (terms is NARROW)
    assert world.counts["compared"] > 0.8 * 4 * 80
    assert world.share >= 0.985
    assert world.times()[-1] < 1000  # no rank waits for what will not come


def test_the_last_rank_that_lives_keeps_the_bound() -> None:
    """Whose deadline is learned from two others' longest: it was stage_max / 10 longer than all may take."""
    with World(3, 59, Terms(rate=1e7, room=8 << 10), steps=4) as world:
        world.start()
        world.kill(0, 1)
        world.finish()
    assert world.nodes[2].step == 4


def test_a_rank_that_rests_makes_clocks_wait_longer_for_a_majority() -> None:
    """D_start follows what a step computes, the rest included, and ops keep the bound with it."""
    with World(4, 0, steps=3, paced=3e6) as world:
        world.start()
        world.kill(0, 1)
        world.nodes[2].pause = 1500 * MS
        world.finish()
    assert world.nodes[2].over[-1].took > world.nodes[2].engine.job.config.bound


def test_a_rank_that_was_stopped_blames_others_by_what_it_launches_then() -> None:
    """It blamed no rank in that step: all waited once more, 2 s in warm-up, for one that was cut off meanwhile."""
    with World(4, steps=9) as world:
        world.start().until(lambda: world.nodes[0].step == 4, S)
        world.stop(0, 450 * MS)
        world.unplug(1, 60 * S)
        world.until(lambda: world.nodes[2].step == 8, 60 * S)
        assert {done.step for done in world.nodes[2].over if done.took > S} == {4, 5}


def test_a_find_is_done_before_its_turn_may_drop_the_op() -> None:
    with World(3, plan=Plan(compute=0)) as world:
        engine = world.start().nodes[0].engine
        world.until(lambda: bool(engine._ops), S)
        op = next(iter(engine._ops.values()))
        engine._rest.found, engine._rest.label = Found.MISMATCH, op.label
        engine._commands.append((Future(), lambda: engine._window.drop(op.place)))
        engine.turn(world.fabric.now)
        assert op.label not in engine._ops


# -- any sequence of faults -------------------------------------------------------------------------------------------

TERMS = [Terms(), Terms(rate=1e7, room=8 << 10), Terms(queue=64 << 10), Terms(jitter=5 * MS)]
NUMBERS = st.integers(0, 4)
LENGTHS = st.sampled_from([5, 40, 250, 1500])


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
        self.world = World(ranks, seed, terms, steps=1 << 30, paced=paced, switch=switch, share_rows=share_rows).start()

    def _one(self, number: int) -> int:
        return self.world.alive[number % len(self.world.alive)].rank

    @property
    def _dead(self) -> list[int]:
        return [node.rank for node in self.world.nodes if node.dead]

    @rule(length=st.sampled_from([3, 30, 200, 700]))
    def go_on(self, length: int) -> None:
        self.world.go(length * MS)

    @rule(loss=st.sampled_from([0.0, 0.01, 0.1, 0.5]), burst=st.sampled_from([0.0, 8.0]))
    def lose(self, loss: float, burst: float) -> None:
        self.world.fabric.terms = replace(self.world.fabric.terms, loss=loss, burst=burst)

    @rule(number=NUMBERS, length=LENGTHS)
    def stop(self, number: int, length: int) -> None:
        self.world.stop(self._one(number), length * MS)

    @rule(number=NUMBERS, cut=st.booleans(), speed=st.sampled_from([0.02, 0.3, 1.0, 1.0, 1.0]))
    def change_a_link(self, number: int, cut: bool, speed: float) -> None:
        self.world.change(self._one(number), cut=cut, speed=speed)

    @rule(number=NUMBERS, length=LENGTHS, how=st.sampled_from(["pause", "away"]))
    def rest(self, number: int, length: int, how: str) -> None:
        """Before its next step it holds, or does nothing for a while and goes on where the others are then."""
        setattr(self.world.nodes[self._one(number)], how, length * MS)

    @rule(owners=st.sets(st.integers(0, 4)))
    def propose_a_map(self, owners: set[int]) -> None:
        self.world.propose(tuple(sorted(owners.intersection(range(self.world.ranks)))) or (0,))

    @precondition(lambda self: len(self.world.alive) > 2)
    @rule(number=NUMBERS)
    def kill(self, number: int) -> None:
        self.world.kill(self._one(number))

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
            world.fabric.terms = replace(world.fabric.terms, loss=0.0, burst=0.0)
            for node in world.alive:
                world.change(node.rank, speed=1.0, cut=False)
            world.steps = max(node.step for node in world.alive) + 3
            world.finish()


Training.TestCase.settings = settings(
    max_examples=9, stateful_step_count=10, derandomize=True, phases=(Phase.explicit, Phase.generate), deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
TestTraining = pytest.mark.timeout(300)(Training.TestCase)


def test_the_first_part_of_the_soak_runs() -> None:
    from soak import machine  # which imports this file

    counts: dict[str, float] = {}
    assert machine.tried(machine.counted(Training, lambda name, n: counts.update({name: n})), 7, 2) == ""
    assert (counts["sequences"], counts["virtual"] > 0) == (1, True)
