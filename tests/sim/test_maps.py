"""Owner maps in whole jobs, in virtual time: stragglers and dead ranks own nothing, and come back (clock-22)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fault_rows import contributors
from sim.engine import Plan, Rank, World
from sim.team import Result, SimTeam, sim_team
from support import Trouble, alike, gradients, hasty, patient, whole
from tailbound.codec.owners import place
from tailbound.codec.shape import shape_for
from tailbound.collective.alerts import Unheard
from tailbound.collective.transpose import Transpose
from tailbound.transport.agreement import Kind, Message
from tailbound.transport.steps import STEP_MASK
from tailbound_lab.simulate.fabric import MS, Terms

WIDTH, ROWS = 64, 256
NUMEL = ROWS * WIDTH
SMALL = {"width": WIDTH, "ring_mib": 1.0}
#: Whom the others wait for; nothing is decided by measuring.
GIVEN = SMALL | {"share_rows": False}
#: By so much stragglers are late, ns.
LATE = 80 * MS
#: Steps begin so far apart, ns: agreements are reached over some of them.
STEP = 20 * MS


def propose(job: SimTeam, owners: tuple[int, ...]) -> int:
    """Has rank 0 propose a map and waits until it is agreed on; its id."""
    agreement = job[0]._engine.maps.agreement
    assert job[0]._engine.call(lambda: agreement.propose(owners, job[0].job.sequence.upcoming >> 10, job.now)).result(0)
    job.until(lambda: agreement.agreed[-1].map.owners == owners, f"{owners} are agreed on", 1000 * MS)
    return agreement.known


def owners_of(job: SimTeam, rank: int = 0) -> tuple[int, ...]:
    return job[rank]._engine.maps.agreement.agreed[-1].map.owners


def step(job: SimTeam, seed: int, ranks: list[int] | None = None, late: dict[int, int] | None = None) -> list[Result]:
    """One all-reduce, and some time."""
    results = job.allreduce(gradients("U", len(job), NUMEL, seed=seed), ranks, late)
    job.go(STEP)
    return results


def right(job: SimTeam, seed: int, late: dict[int, int] | None = None) -> None:
    """One all-reduce that is whole and everybody's mean, with the same bits everywhere."""
    whole(step(job, seed, late=late), gradients("U", len(job), NUMEL, seed=seed))


def until(job: SimTeam, late: dict[int, int], done: Callable[[], bool], most: int) -> None:
    """Right steps until ``done``; fails after ``most``."""
    for seed in range(most):
        if done():
            return
        right(job, seed, late)
    pytest.fail(f"not within {most} steps: {[owners_of(job, r) for r in range(len(job))]}")


@pytest.mark.parametrize(("ranks", "late"), [(3, [0]), (4, [0, 3])])
def test_stragglers_own_nothing_until_they_recover(ranks: int, late: list[int]) -> None:
    with sim_team(ranks, patient(**SMALL)) as job:
        expected = tuple(r for r in range(ranks) if r not in late)
        delays = dict.fromkeys(late, LATE)
        until(job, delays, lambda: {owners_of(job, r) for r in range(ranks)} == {expected}, 40)
        until(job, delays, lambda: all(c.job.sequence.map.owners == expected for c in job.communicators), 20)
        until(job, {}, lambda: owners_of(job) == tuple(range(ranks)), 80)
        until(job, {}, lambda: all(c.job.sequence.map.owners == tuple(range(ranks)) for c in job.communicators), 20)
        for c in job.communicators:
            assert "WRONG_MAP" not in c.stats()["drops"]


class _Busy(World):
    """A host with fewer cores than ranks: in each step they compute one after the other, in an order of its own."""

    TURN = 15 * MS

    def compute_of(self, node: Rank) -> int:
        order = list(range(self.ranks))
        random.Random(f"{self._seed}/{node.step}").shuffle(order)
        return self.plan.compute + order[node.rank] * self.TURN


def test_ranks_that_wait_for_cores_in_turn_keep_their_rows() -> None:
    """The map went to and fro between single owners, with 15 and 20 changes in 150 steps. Rule: clock-22."""
    with _Busy(4, plan=Plan((WIDTH * 64,)), steps=100, share_rows=True) as job:
        job.run()
        for node in job.nodes:
            assert node.engine.job.counters["maps_settled"] == 0
            assert not sum(sum(done.missing_of.values()) for done in node.over)


def test_the_dead_own_nothing_and_the_others_have_all_of_their_rows() -> None:
    with sim_team(4, hasty(**SMALL, rotate=False)) as job:
        for seed in range(4):
            right(job, seed)
        job[0].trouble(Trouble(seed=0, loss=1.0))  # the lowest rank, which would lead
        others = [1, 2, 3]
        for seed in range(12):
            results = step(job, seed, others)
            if all(owners_of(job, r) == (1, 2, 3) and job[r].job.sequence.map.id for r in others):
                break
        else:
            pytest.fail(f"it still owns rows: {[owners_of(job, r) for r in others]}")
        for seed in range(3):
            results = step(job, seed, others)
        for _, outcome in results:
            assert outcome.missing <= {0}
            assert (outcome.missed, outcome.deadline_hits, outcome.failed_groups) == (0, 0, 0)
        alike(results)
        inputs = gradients("U", 4, NUMEL, seed=2)
        assert set(contributors(results[0][0], inputs, {0}, WIDTH)) == {frozenset(others)}
        assert job[1].job.sequence.map.id & 0xFF == 1


def test_a_rank_that_misses_a_map_is_refused_until_it_hears_of_it() -> None:
    with sim_team(3, hasty(**GIVEN, rotate=False)) as job:
        for seed in range(4):
            right(job, seed)
        blocked = True
        for member in job.communicators:
            maps, send = member._engine.maps, member._engine.maps._send

            def pick(peer: int, message: Message, send: Callable[[int, Message], None] = send) -> None:
                if not (blocked and peer == 2 and message.kind == Kind.SETTLED):
                    send(peer, message)

            maps._send = pick  # type: ignore[method-assign]
        wanted = propose(job, (0, 2))
        for seed in range(20):
            if {c.job.sequence.map.id for c in job.communicators[:2]} == {wanted}:
                break
            step(job, seed)
        assert job[0].job.sequence.map.id == job[1].job.sequence.map.id == wanted
        assert [owners_of(job, r) for r in range(3)] == [(0, 2), (0, 2), (0, 1, 2)]
        owner = place(shape_for(NUMEL, WIDTH), job[0].job.sequence.map, 3).owner
        inputs = gradients("U", 3, NUMEL, seed=7)
        results = step(job, 7)
        assert all(c.stats()["drops"]["WRONG_MAP"] for c in job.communicators)
        for out, outcome in results[:2]:
            assert outcome.error is None
            assert outcome.missing == {2}
            # half of the rows are rank 2's now: they are missing, and nothing else is in their place
            found = np.array(contributors(out, inputs, {2}, WIDTH))
            assert all(who is None for who in found[owner == 2])
            assert set(found[owner != 2]) == {frozenset({0, 1})}
        assert results[2][1].error is None
        contributors(results[2][0], inputs, {0, 1, 2}, WIDTH)
        blocked = False
        for seed in range(6):
            step(job, seed)
        assert owners_of(job, 2) == (0, 2)
        right(job, 9)


def test_many_maps_one_after_the_other_cost_no_row_and_no_memory() -> None:
    with sim_team(3, patient(**GIVEN)) as job:
        for i, owners in enumerate([(0, 2), (1,), (0, 1, 2), (2,), (0, 1)]):
            propose(job, owners)
            until(
                job, {}, lambda owners=owners: all(c.job.sequence.map.owners == owners for c in job.communicators), 20
            )
            for j in range(3):
                right(job, 10 * i + j)
            assert {c.job.sequence.map.owners for c in job.communicators} == {owners}
        for c in job.communicators:
            assert "WRONG_MAP" not in c.stats()["drops"]
            assert len(c._engine._window.pool._free) <= 5


def test_who_owns_nothing_learns_how_long_results_take() -> None:
    """It seals nothing, so that its second half has no beginning of its own. Rule: clock-11."""
    with sim_team(3, patient(**GIVEN | {"deadline_1": 0, "deadline_2": 0}), terms=Terms(rate=1e6)) as job:
        propose(job, (0, 1))
        until(job, {}, lambda: all(c.job.sequence.map.owners == (0, 1) for c in job.communicators), 20)
        for seed in range(30):
            right(job, seed)
        took, _ = job[2].job.accounts.latency.percentiles(50, 99)
        second = job[2].job.deadlines.stage_two(job[2].job.deadlines.largest)
        assert took < second < 4 * took


def jump_to(job: SimTeam, to: int) -> None:
    """All ranks go on in step ``to``, as if they had made the steps before."""
    job.drain()
    for member in job.communicators:
        member._engine.jump(replace(member._engine.position(), step=to))
        member._step = to


@pytest.mark.parametrize("changes", [0, 2])
def test_maps_hold_when_step_numbers_turn_over(changes: int) -> None:
    """After 2^21 steps every map seemed to be still to come: ranks placed rows by one map and took them by another."""
    with sim_team(4, hasty(**GIVEN) | {"ring_mib": 0.125}) as job:
        for seed in range(4):
            right(job, seed)
        for content in ((0, 1, 2), (0, 1))[:changes]:
            propose(job, content)
            for seed in range(8):
                right(job, seed)
        agreed = job[0]._engine.maps.agreement.agreed[-1]
        since, half = agreed.since, (STEP_MASK + 1) // 2
        for to in (since + half // 2, since + half - 3, since + half + half // 2, since + 2 * half - 3):
            jump_to(job, to & STEP_MASK)
            for seed in range(8):
                right(job, seed)
            assert [owners_of(job, rank) for rank in range(4)] == [agreed.map.owners] * 4
        propose(job, (0, 2, 3))  # another map can be had, and rank 3 owns rows anew
        for seed in range(8):
            right(job, seed)
        assert owners_of(job) == (0, 2, 3)


def test_the_lateness_of_a_suspect_hides_no_straggler() -> None:
    """A rank that was 800 ms late when it died kept the limit for the others at 200 ms for good."""
    with sim_team(4, hasty(**GIVEN)) as job:
        for seed in range(4):
            right(job, seed)
        engine = job[0]._engine
        engine.job.store.peer_states["lateness"][3] = 12_500
        assert engine.maps._lateness_of_all()[3] == 800 * MS
        engine.died(3)
        assert 3 not in engine.maps._lateness_of_all()


def test_who_comes_back_does_not_wait_for_another_that_is_away() -> None:
    """With two ranks down the first one back ended 180 s later: it had heard nothing of the other in this process."""
    with sim_team(4, hasty(**GIVEN)) as job:
        watched = [type(one) for one in Transpose(job[0].job, outside=True)._watching]
        assert Unheard not in watched
        assert Unheard in [type(one) for one in Transpose(job[0].job)._watching]
