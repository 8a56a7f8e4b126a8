"""The real engine in virtual time (``sim.engine``): bounds, acknowledgements, equal bits, balanced books."""

from __future__ import annotations

import pytest

from sim.engine import Plan, World
from sim.fabric import MS, Terms

#: A network that loses nothing, and what else it may be.
CALM = Terms()
UNIFORM = Terms(loss=0.02)
BURSTS = Terms(loss=0.02, burst=5)
#: Sockets so small that results wait for room, at a tenth of the usual rate.
NARROW = Terms(loss=0.02, burst=5, room=8 << 10, rate=1e7)
#: A switch with queues of 64 KiB.
SHALLOW = Terms(queue=64 << 10)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_where_nothing_is_lost_every_row_arrives(ranks: int) -> None:
    world = World(ranks, seed=ranks, steps=20).run()
    assert world.counts["delivered"] == world.counts["expected"]
    assert not any(world.fabric.dropped.values())
    assert all(len(node.over) == 40 for node in world.nodes)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("terms", [UNIFORM, BURSTS, NARROW], ids=["uniform", "bursts", "narrow"])
def test_losses_are_repaired_within_the_bound(terms: Terms, seed: int) -> None:
    world = World(4, seed, terms, steps=40).run()
    assert world.fabric.dropped["loss"] > 0
    assert world.share >= 0.985
    assert world.times()[-1] < 1000  # nobody waits for what will not come


def test_shallow_queues_of_a_switch() -> None:
    world = World(8, seed=1, terms=SHALLOW, plan=Plan((64 * 512,)), steps=20).run()
    assert world.share >= 0.985


@pytest.mark.parametrize("seed", [5, 6, 7])
def test_what_is_let_go_has_been_acknowledged(seed: int) -> None:
    """A step's last results that left together with answers were not acknowledged: steps of the demo took 1.2 s."""
    World(4, seed, NARROW, Plan((64 * 256, 64 * 256)), steps=40).run()


@pytest.mark.parametrize("length", [30, 300, 1500], ids=lambda ms: f"{ms}ms")
def test_a_rank_that_stands_still(length: int) -> None:
    world = World(4, seed=length, terms=UNIFORM, steps=60)
    world.stop(2, at=300 * MS, length=length * MS)
    world.run()
    assert all(node.step >= 60 for node in world.nodes)


def test_a_rank_that_dies_costs_little_and_holds_nobody_up() -> None:
    world = World(4, seed=3, steps=60)
    world.kill(1, at=250 * MS)
    world.run()
    after = [done.took / MS for node in world.alive for done in node.over[-40:]]
    assert max(after) < 100


def test_the_last_rank_that_lives_keeps_the_bound() -> None:
    """Whose deadline is learned from two others' longest: it was stage_max / 10 longer than all may take."""
    world = World(3, seed=59, terms=Terms(rate=1e7, room=8 << 10), steps=4).start()
    world.kill(0, at=0)
    world.kill(1, at=0)
    world.finish()
    assert [node.rank for node in world.alive] == [2]


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_link_that_becomes_slow_and_comes_back(share: float) -> None:
    world = World(4, seed=4, terms=Terms(rate=5e7), steps=60)
    world.change(3, at=200 * MS, speed=share)
    world.change(3, at=600 * MS, speed=1.0)
    world.run()
    assert world.share >= 0.95


def test_a_cut_cable_that_is_mended() -> None:
    world = World(3, seed=5, steps=60)
    world.change(0, at=200 * MS, cut=True)
    world.change(0, at=500 * MS, cut=False)
    world.run()
    assert all(node.step >= 60 for node in world.nodes)


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [World(3, seed=6, terms=BURSTS, steps=10).run() for _ in range(2)]
    assert runs[0].times().tolist() == runs[1].times().tolist()
    assert runs[0].fabric.dropped == runs[1].fabric.dropped
