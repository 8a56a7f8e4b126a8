"""``strict`` in virtual time: an op waits for every row of who takes part, and no longer than it says (clock-34)."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sim.repeats import dropped
from sim.team import Result, SimTeam, sim_team
from support import Trouble, gradients
from tailbound.collective.announce import farewell
from tailbound.wire.schema import PacketType
from tailbound_lab.simulate.fabric import MS, S

WIDTH, ROWS = 64, 8 * 64
NUMEL = ROWS * WIDTH
RANKS, OPS = 3, 25
#: Deadlines that leave repair no time, so that what is lost stays lost.
HASTY = {
    "width": WIDTH, "ring_mib": 1.0, "deadline_1": 3 * MS, "deadline_2": 3 * MS, "stage_max": 20 * MS,
    "start_max": 200 * MS,
}  # fmt: skip


def ops(job: SimTeam, count: int = OPS) -> list[list[Result]]:
    """``count`` ops; every one is held to its bound by the simulation, without slack."""
    return [job.allreduce(gradients("U", len(job), NUMEL, seed=op)) for op in range(count)]


def averages(strict: int, loss: float) -> tuple[list[list[NDArray[np.float32]]], int, int]:
    """What each rank gets in each op; rows that are missing, and packets that were lost."""
    with sim_team(RANKS, HASTY | {"strict": strict}) as job:
        troubles = job.trouble(lambda: Trouble(seed=4, loss=loss))
        done = ops(job)
        missing = sum(outcome.expected - outcome.delivered for results in done for _, outcome in results)
        lost = sum(dropped(troubles, kind) for kind in PacketType)
        return [[out for out, _ in results] for results in done], missing, lost


def test_with_losses_every_row_arrives_and_the_mean_is_the_one_without() -> None:
    """5 % of all packets are lost, of answers, questions and words too. Rules: clock-34, clock-12."""
    exact, _, _ = averages(0, 0.0)
    strict, missing, lost = averages(10 * S, 0.05)
    assert missing == 0
    assert lost > OPS * RANKS * ROWS * 0.02
    for mine, theirs in zip(strict, exact, strict=True):
        for out in mine:
            np.testing.assert_array_equal(out, theirs[0])


@pytest.mark.parametrize("seed", range(3))
def test_scales_are_agreed_on_although_words_are_lost(seed: int) -> None:
    """Half of what ranks tell of their scales is lost. Who has not heard one that has settled asks it until it has: on
    other scales its rows would be refused. Rules: clock-34, clock-26.
    """
    with sim_team(RANKS, HASTY | {"strict": 10 * S}) as job:
        job.trouble(lambda: Trouble(seed=seed, loss=0.5, types=frozenset({PacketType.READY})))
        for results in ops(job, 1):
            assert all(outcome.delivered == outcome.expected for _, outcome in results)
            assert max(outcome.nanoseconds for _, outcome in results) < 1 * S


def test_a_stopped_rank_costs_what_strict_says_until_it_is_suspected() -> None:
    """Both halves of an op miss it, and wait once. Rules: clock-34, clock-14."""
    strict = 700 * MS
    took = {}
    for given in (0, strict):
        with sim_team(4, HASTY | {"strict": given}) as job:
            ops(job, 2)
            job[3].trouble(Trouble(seed=0, loss=1.0))
            live = [0, 1, 2]
            took[given] = []
            for op in range(5):
                results = job.allreduce(gradients("U", 4, NUMEL, seed=op), ranks=live)
                took[given].append(max(outcome.nanoseconds for _, outcome in results))
            assert all(3 in member.job.membership.suspects for member in job.communicators[:3])
    more = [with_it - without for with_it, without in zip(took[strict], took[0], strict=True)]
    assert more[:3] == pytest.approx([strict] * 3, abs=30 * MS)
    assert more[3:] == pytest.approx([0, 0], abs=30 * MS)


def test_who_has_said_goodbye_is_not_waited_for() -> None:
    """Rules: clock-34, clock-15."""
    with sim_team(4, HASTY | {"strict": 10 * S}) as job:
        ops(job, 2)
        farewell(job[3].job, job[3].job.marks.contributed)
        for op in range(2):
            results = job.allreduce(gradients("U", 4, NUMEL, seed=op), ranks=[0, 1, 2])
            assert max(outcome.nanoseconds for _, outcome in results) < 1 * S


@pytest.mark.parametrize("silent", [(), (2,)])
def test_who_takes_part_without_rows_costs_no_time(silent: tuple[int, ...]) -> None:
    """Rows that nobody has are known not to come. Rules: clock-34, clock-25."""
    with sim_team(RANKS, HASTY | {"strict": 10 * S}) as job:
        ops(job, 2)
        for op in range(4):
            results = job.allreduce(gradients("U", RANKS, NUMEL, seed=op), silent=silent)
            assert max(outcome.nanoseconds for _, outcome in results) < 1 * S
            assert all(outcome.missed == 0 for _, outcome in results)
