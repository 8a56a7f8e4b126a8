"""Gradients never become zero for the rest of a job, in virtual time: scales come back, and a job that cannot ends.

What a rank carries from one op to the next recovers without a packet of one particular rank (codec-5, clock-37).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from sim.engine import Plan, World
from sim.team import sim_team
from support import exact_mean, gradients, nmse, patient
from tailbound.simulate.fabric import MS, S

#: Of virtual time, ns.
LONGEST = 100 * S
#: One bucket a step, and steps long enough for a map to begin three steps after it is settled.
PLAN = Plan((64 * 256,), compute=50 * MS)
#: Steps after which all is whole again once nothing is wrong any more.
SOON = 5
#: Ops that lack rows end soon, in warm-up as well.
SHORT = {"stage_max": 200 * MS, "start_max": 100 * MS}


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _cut(job: World, rank: int) -> None:
    job.change(rank, 0, cut=True)
    job.change(rank, 3 * S, cut=False)


AWAY: dict[str, Callable[[World, int], None]] = {
    "dies": lambda job, rank: job.kill(rank, 0),
    "is stopped": lambda job, rank: job.stop(rank, 0, 3 * S),
    "is cut off": _cut,
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("how", AWAY)
def test_the_others_average_again_when_the_only_owner_is_away(how: str, seed: int) -> None:
    """Nobody was left with a scale of any group, so that no row was ever sent again. Rule: codec-5.

    Three ops pass until it is suspected. Three more pass until a map without it has been settled, since the map before
    was still waiting for it, and three until that begins.
    """
    with World(3, seed, plan=PLAN, steps=1 << 30, share_rows=True, rotate=False, **SHORT) as job:
        job.start()
        job.until(lambda: job.nodes[0].step >= 4, LONGEST)
        assert job.propose((0, 0, 1))
        job.until(lambda: all(n.engine.job.sequence.map.owners == (2,) for n in job.nodes), LONGEST)
        AWAY[how](job, 2)
        gone = max(node.step for node in job.nodes)
        job.until(lambda: job.nodes[0].step > gone + 12, LONGEST)
        job.until(lambda: len({n.step for n in job.alive}) == 1, LONGEST)
        back = job.nodes[0].step
        job.steps = back + SOON + 3
        job.finish()
        for node in job.alive:
            for done in node.over:
                who = (0, 1) if done.step < back + SOON else [n.rank for n in job.alive]
                if done.step >= gone + 9 and node.rank in who:
                    assert done.outcome.failed_groups == 0, done
                    assert not sum(done.missing_of[rank] for rank in who), done


def test_an_op_in_which_all_abstain_takes_no_scales_from_who_owns_no_rows() -> None:
    """It was left out of the next op of every bucket. Rules: clock-25, codec-5."""
    numel = 64 * 256
    ill = [np.full(numel, np.nan, np.float32)] * 3
    with sim_team(3, patient(share_rows=False, rotate=False)) as job:
        for seed in range(40):
            job.allreduce(gradients("U", 3, numel, seed=seed))
            job.go(20 * MS)
            if seed == 4:
                assert job.world.propose((1, 1, 0))
        assert {member.job.sequence.map.owners for member in job.communicators} == {(0, 1)}
        assert all(outcome.void for _, outcome in job.allreduce(ill))
        inputs = gradients("U", 3, numel, seed=9)
        for out, outcome in job.allreduce(inputs):
            assert outcome.missing == set()
            assert outcome.delivered == outcome.expected
            assert nmse(out, exact_mean(inputs)) < 2e-3
