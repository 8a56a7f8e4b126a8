"""Owner maps in whole jobs, in virtual time: stragglers and dead ranks own nothing, and come back (clock-22)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from fault_rows import contributors
from sim.team import SimTeam, sim_team
from support import gradients, hasty, launch, patient
from tailbound.codec.owners import place
from tailbound.codec.shape import shape_for
from tailbound.collective import maps
from tailbound.transport.agreement import OPEN, Message
from tailbound.transport.config import Limits
from tailbound.transport.steps import STEP_MASK
from tailbound_lab.simulate.fabric import MS, Terms

WIDTH, ROWS = 64, 256
NUMEL = ROWS * WIDTH
SMALL = {"width": WIDTH, "ring_mib": 1.0}
#: Owners are proposed, and nothing is decided by measuring.
GIVEN = SMALL | {"share_rows": False}
#: By so much stragglers are late, ns.
LATE = 80 * MS


def right(job: SimTeam, steps: int, late: dict[int, int] | None = None) -> None:
    """So many steps of which each is whole, and some time: agreements are reached over some of them."""
    for seed in range(steps):
        job.right(NUMEL, seed, late=late)
        job.go(20 * MS)


def until(job: SimTeam, owners: tuple[int, ...], most: int, late: dict[int, int] | None = None) -> None:
    """Right steps until all ranks place rows by the map of these owners."""
    for _ in range(most):
        if job.placed_by(owners):
            return
        right(job, 1, late)
    pytest.fail(f"not within {most} steps: {[member.job.sequence.map.owners for member in job.communicators]}")


@pytest.mark.parametrize(("ranks", "late"), [(3, [0]), (4, [0, 3])])
def test_stragglers_own_nothing_until_they_recover(ranks: int, late: list[int]) -> None:
    with sim_team(ranks, patient(**SMALL)) as job:
        until(job, tuple(r for r in range(ranks) if r not in late), 60, dict.fromkeys(late, LATE))
        until(job, tuple(range(ranks)), 20)
        assert not any("WRONG_MAP" in member.stats()["drops"] for member in job.communicators)


@contextmanager
def untold(job: SimTeam, rank: int) -> Iterator[None]:
    """Rank ``rank`` hears of no map that is settled, only of proposals."""
    blocked = True
    for member in job.communicators:
        maps, send = member._engine.maps, member._engine.maps._send

        def pick(peer: int, message: Message, send: Callable[[int, Message], None] = send) -> None:
            proposes = message.maps[-1:] and message.maps[-1].since == OPEN
            if not (blocked and peer == rank and message.maps and not proposes):
                send(peer, message)

        maps._send = pick  # type: ignore[method-assign]
    yield
    blocked = False


def test_a_rank_that_misses_a_map_is_refused_until_it_hears_of_it() -> None:
    with sim_team(3, hasty(**GIVEN, rotate=False)) as job:
        right(job, 4)
        with untold(job, 2):
            assert job.world.propose((0, 2))
            for seed in range(20):
                moved = job.placed_by((0, 2), [0, 1])
                inputs, results = job.averaged(NUMEL, seed)
                job.go(20 * MS)
                if moved:
                    break
        assert [member.job.sequence.map.owners for member in job.communicators] == [(0, 2), (0, 2), (0, 1, 2)]
        assert all(member.stats()["drops"]["WRONG_MAP"] for member in job.communicators)
        assert not any(outcome.error for _, outcome in results)
        owner = place(shape_for(NUMEL, WIDTH), job[0].job.sequence.map, 3).owner
        for out, outcome in results[:2]:
            assert outcome.missing == {2}
            # half of the rows are rank 2's now: they are missing, and nothing else is in their place
            found = np.array(contributors(out, inputs, {2}, WIDTH))
            assert set(found[owner == 2]) == {None}
            assert set(found[owner != 2]) == {frozenset({0, 1})}
        contributors(results[2][0], inputs, {0, 1, 2}, WIDTH)
        for seed in range(6):
            job.averaged(NUMEL, seed)
            job.go(20 * MS)
        assert job.placed_by((0, 2))
        right(job, 1)


def test_a_rank_that_owns_rows_by_an_old_map_alone_says_that_its_averages_may_differ() -> None:
    """It had all results of the others, and its own means in place of theirs, and was taken for equal: clock-21."""
    with sim_team(3, hasty(**GIVEN, safeguard=Limits(skip=None))) as job:
        right(job, 4)
        with untold(job, 2):
            assert job.world.propose((0, 1))
            while not job.placed_by((0, 1), [0, 1]):
                right(job, 1)
            data = gradients("U", 3, NUMEL, seed=0)
            done = [launch(job[2], data[2], data[2])]
        while not job.placed_by((0, 1)):
            job.go(MS)
        done += [launch(job[rank], data[rank], data[rank]) for rank in (0, 1)]
        job.go(3000 * MS)
        assert [(one.result(0).missed, one.result(0).doubtful) for one in done] == [(0, True), (0, False), (0, False)]


def test_a_rank_in_step_that_hears_too_late_of_a_map_learns_where_rows_go() -> None:
    """It went on refusing all contributions as stale, and had all ranks skip every step. Rules: clock-20, clock-22."""
    with sim_team(3, hasty(**GIVEN)) as job:
        right(job, 4)
        with untold(job, 2):
            assert job.world.propose((0, 2))
            for seed in range(20):
                job.averaged(NUMEL, seed)
                job.go(20 * MS)
        while not job.placed_by((0, 2)):
            job.averaged(NUMEL, 0)
        job.drain()
        assert (job[2].lost, job[2].behind, job[2].jump(), job[2].lost) == (True, 0, 0, False)
        for seed in range(2):  # in which the others see that it is back
            job.averaged(NUMEL, seed)
        right(job, 3)


def test_a_rank_that_owns_nothing_learns_how_long_results_take() -> None:
    """It seals nothing, so that its second half has no beginning of its own. Rule: clock-11."""
    with sim_team(3, patient(**GIVEN | {"deadline_1": 0, "deadline_2": 0}), terms=Terms(rate=1e6)) as job:
        assert job.world.propose((0, 1))
        until(job, (0, 1), 20)
        right(job, 30)
        took = np.median(job[2].job.accounts.latency)
        second = job[2].job.deadlines.stage_two(job[2].job.deadlines.largest)
        assert took < second < 4 * took


def test_maps_hold_when_step_numbers_turn_over() -> None:
    """After 2^21 steps every map seemed to be still to come: ranks placed rows by one map and took them by another."""
    with sim_team(4, hasty(**GIVEN) | {"ring_mib": 0.125}) as job:
        right(job, 4)
        for owners in ((0, 1, 2), (2,), (0, 1)):
            assert job.world.propose(owners)
            until(job, owners, 12)
        since, half = job[0]._engine.maps.agreement.agreed[-1].since, (STEP_MASK + 1) // 2
        for to in (since + half // 2, since + half - 3, since + half + half // 2, since + 2 * half - 3):
            job.drain()
            for member in job.communicators:  # they go on in this step, as if they had made those before
                member._engine.jump(replace(member._engine.position(), step=to & STEP_MASK))
            right(job, 8)
            assert job.placed_by((0, 1))
        assert job.world.propose((0, 2, 3))  # another map can be had, and rank 3 owns rows anew
        until(job, (0, 2, 3), 8)
        assert not any("WRONG_MAP" in member.stats()["drops"] for member in job.communicators)


def test_a_rank_that_has_left_owes_no_rows_however_many_steps_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 2^21 steps its marks seemed to be still to come: every op asked it for its rows. Rule: clock-22."""
    monkeypatch.setattr(maps, "_AGE_EVERY", 1)
    with sim_team(3, hasty(**GIVEN) | {"ring_mib": 0.125}) as job:
        right(job, 4)
        job.world.kill(2)
        for member in job.communicators[:2]:
            member.job.membership.bye(2, member.job.sequence.upcoming - 1)
        for to in range(0, STEP_MASK, STEP_MASK // 8 + 1):
            for member in job.communicators[:2]:
                member._engine.jump(replace(member._engine.position(), step=to + 4))
            for seed in range(8):
                assert all(outcome.nanoseconds < 10 * MS for _, outcome in job.averaged(NUMEL, seed, [0, 1])[1])
            job.drain()
