"""The first part of ``make soak`` runs, and a failure that it has found stays mended."""

from __future__ import annotations

import pytest

from sim.engine import World
from sim.test_machine import Training
from soak import machine
from tailbound_lab.simulate.fabric import MS


def test_the_engine_passes_a_few() -> None:
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
