"""The real engine in virtual time (``sim.engine``): bounds, acknowledgements, equal bits, balanced books.

Rules: clock-7b, clock-12, clock-19, kernel-21. The same seed gives the same run: ``test_simulate``.
"""

from __future__ import annotations

import pytest

from sim.engine import Plan, World
from tailbound_lab.simulate.fabric import Terms

#: Losses one by one and in bursts; sockets so small that results wait for room, at a tenth of the usual rate.
UNIFORM = Terms(loss=0.02)
BURSTS = Terms(loss=0.02, burst=5)
NARROW = Terms(loss=0.02, burst=5, room=8 << 10, rate=1e7)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_where_nothing_is_lost_every_row_arrives(ranks: int) -> None:
    with World(ranks, seed=ranks, steps=20) as world:
        world.run()
    assert world.counts["delivered"] == world.counts["expected"]
    assert world.counts["compared"] == ranks * 40
    assert not any(world.fabric.dropped.values())
    assert all(len(node.over) == 40 for node in world.nodes)


@pytest.mark.parametrize(
    ("terms", "seed"),
    [
        pytest.param(terms, seed, marks=[] if seed == everyday else [pytest.mark.thorough], id=f"{name}-{seed}")
        for name, terms, everyday in (("uniform", UNIFORM, 0), ("bursts", BURSTS, 1), ("narrow", NARROW, 0))
        for seed in range(4)
    ],
)
def test_losses_are_repaired_within_the_bound(terms: Terms, seed: int) -> None:
    with World(4, seed, terms, steps=40) as world:
        world.run()
    assert world.fabric.dropped["loss"] > 0
    assert any(node.engine.job.flow.queue.waits for node in world.nodes) == (terms is NARROW)
    assert world.counts["compared"] > 0.8 * 4 * 80
    assert world.share >= 0.985
    assert world.times()[-1] < 1000  # no rank waits for what will not come


def test_shallow_queues_of_a_switch() -> None:
    with World(8, 1, Terms(queue=24 << 10), Plan((64 * 512,)), steps=20) as world:
        world.run()
    assert world.fabric.dropped["queue"] > 0
    assert world.share >= 0.97


def test_the_last_rank_that_lives_keeps_the_bound() -> None:
    """Whose deadline is learned from two others' longest: it was stage_max / 10 longer than all may take."""
    with World(3, 59, Terms(rate=1e7, room=8 << 10), steps=4) as world:
        world.start()
        world.kill(0, at=0)
        world.kill(1, at=0)
        world.finish()
    assert world.nodes[2].step == 4
