"""The real engine in virtual time, with losses, and with any sequence of faults.

``sim.engine`` checks bounds, acknowledgements, equal bits and books. Rules: clock-7b, clock-12, clock-19, kernel-21.

The same few jobs are tried every time, ``make soak`` tries others for as long as it is told.
"""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from sim.engine import Plan, World
from soak.jobs import life
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


@pytest.mark.parametrize(("terms", "seed"), [(UNIFORM, 0), (BURSTS, 1), (NARROW, 0)])
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


# -- any faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 6])
def test_a_job_with_random_faults(seed: int) -> None:
    """As in the first part of ``make soak``."""
    assert not life(seed, lambda name, number: None)
