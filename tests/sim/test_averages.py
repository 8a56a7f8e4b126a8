"""Gradients never become zero for the rest of a job, in virtual time; steps without a majority are void.

What a rank carries from one op to the next recovers without a packet of one particular rank (codec-5, clock-37).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from sim.engine import Plan, Rank, World, switch_of
from sim.team import SimTeam, sim_team
from support import Trouble, exact_mean, gradients, hasty, nmse, patient
from tailbound.collective.averages import Averages
from tailbound.collective.op import Outcome
from tailbound.errors import TransportError
from tailbound.wire.schema import PacketType, op_label
from tailbound_lab.simulate.fabric import MS, S
from tailbound_lab.simulate.machine import Wire

# -- scales come back, and a job that cannot go on ends ----------------------------------------------------------------


#: Of virtual time, ns.
LONGEST = 100 * S
#: Entries of a bucket; packets with rows.
NUMEL = 64 * 256
ROWS = frozenset({PacketType.CONTRIBUTION, PacketType.RESULT})
#: One bucket a step, and steps long enough for a map to begin three steps after it is settled.
PLAN = Plan((NUMEL,), compute=50 * MS)
#: Steps after which all is whole again once nothing is wrong any more.
SOON = 5
#: Ops that lack rows or a majority end soon, in warm-up as well.
SHORT = {"stage_max": 200 * MS, "start_max": 100 * MS}


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _step(job: SimTeam, seed: int) -> list[Outcome]:
    results = job.allreduce(gradients("U", 3, NUMEL, seed=seed))
    job.go(20 * MS)
    return [outcome for _, outcome in results]


@contextmanager
def _settled(owners: tuple[int, ...], settings: dict[str, Any] | None = None) -> Iterator[SimTeam]:
    """A job of three ranks after some whole steps, in the end in which ``owners`` own all rows."""
    with sim_team(3, settings or hasty(share_rows=False)) as job:
        for seed in range(40):
            if seed == 4:
                assert job.world.propose(owners)
            assert not any(outcome.missed or outcome.error for outcome in _step(job, seed))
        assert {member.job.sequence.map.owners for member in job.communicators} == {owners}
        yield job


AWAY: dict[str, Callable[[World, int], None]] = {
    "dies": lambda job, rank: job.kill(rank, 0),
    "is stopped": lambda job, rank: job.stop(rank, 0, 3 * S),
    "is cut off": lambda job, rank: _unplug(job, str(rank)),
}


@pytest.mark.parametrize("how", AWAY)
def test_the_others_average_again_when_the_only_owner_is_away(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank was left with a scale of any group, so that no row was ever sent again. Rule: codec-5.

    Three ops pass until it is suspected. Three more pass until a map without it has been settled, since the map before
    was still waiting for it, and three until that begins. No job leaves all rows to one rank, and one that does ends
    after two such steps, but here.
    """
    monkeypatch.setattr(Averages, "check", lambda *_: None)
    with World(3, 1, plan=PLAN, steps=1 << 30, share_rows=True, rotate=False, **SHORT) as job:
        job.start()
        job.until(lambda: job.nodes[0].step >= 4, LONGEST)
        assert job.propose((2,))
        job.until(lambda: all(n.engine.job.sequence.map.owners == (2,) for n in job.nodes), LONGEST)
        AWAY[how](job, 2)
        gone = max(node.step for node in job.nodes)
        job.until(lambda: job.nodes[0].step > gone + 12, LONGEST)
        # steps may be equal by chance while it is away or late: then no rank waits for it
        members, missed = job.nodes[0].engine.job.membership, {2} if how == "dies" else set()
        job.until(lambda: len({n.step for n in job.alive}) == 1 and members.suspects <= missed, LONGEST)
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
    ill = [np.full(NUMEL, np.nan, np.float32)] * 3
    with _settled((0, 1), patient(share_rows=False, rotate=False)) as job:
        assert all(outcome.void for _, outcome in job.allreduce(ill))
        inputs = gradients("U", 3, NUMEL, seed=9)
        for out, outcome in job.allreduce(inputs):
            assert outcome.missing == set()
            assert outcome.delivered == outcome.expected
            assert nmse(out, exact_mean(inputs)) < 2e-3


@pytest.mark.parametrize("ranks", [2, 4])
def test_who_alone_has_lost_all_results_costs_the_others_nothing(ranks: int) -> None:
    """It refused all rows at the old scale, so that all ranks skipped the next op. Rule: codec-5."""
    with sim_team(ranks, {"width": 256}) as job:
        for step in range(16):
            inputs = [np.float32(1.3**step) * each for each in gradients("U", ranks, NUMEL, seed=step)]
            for rank in range(ranks - 1):
                job[rank].trouble(partial(_but_results, ranks - 1) if step == 12 else None)
            results = job.allreduce(inputs)
            job.go(20 * MS)
            lost = ranks - 1 if step == 12 else None
            assert (results[-1][1].missed > 0) == (step == 12)
            for rank, (out, outcome) in enumerate(results):
                assert rank == lost or (not outcome.skipped and nmse(out, exact_mean(inputs)) < 0.01), step


def _but_results(rank: int, to: int, packets: list[bytes]) -> list[bytes]:
    """What of ``packets`` gets through where no result reaches ``rank``."""
    return [each for each in packets if to != rank or each[1] != PacketType.RESULT]


@pytest.mark.parametrize("owners", [(0, 1), (2,)], ids=["two own rows", "one owns all"])
def test_a_job_in_which_no_rows_get_through_ends_with_an_error_on_all_ranks(owners: tuple[int, ...]) -> None:
    """It trained on zeros to its end, with exit status 0. Rule: clock-37."""
    with _settled(owners) as job:
        job.trouble(lambda: Trouble(seed=0, loss=1.0, types=ROWS))
        assert not any(outcome.error for outcome in _step(job, 0))
        errors: dict[int, TransportError] = {}
        for seed in range(1, 3):  # who still waits for what a trial tells ends a step later
            left = sorted({0, 1, 2} - errors.keys())
            for rank, (_, outcome) in zip(left, job.allreduce(gradients("U", 3, NUMEL, seed=seed), left), strict=True):
                if isinstance(outcome.error, TransportError):
                    errors[rank] = outcome.error
            job.go(20 * MS)
        assert sorted(errors) == [0, 1, 2]
        size = 20 + 8 + 64 + 256
        for rank, error in errors.items():
            said = rf"^rank {rank}: steps 40 to 4[12] .* rows are lost, .* IP packets of {size} bytes .* TAILBOUND_MTU"
            assert re.search(said, str(error))
            with pytest.raises(TransportError, match=r"steps 40 to 4[12]"):
                job.allreduce(gradients("U", 3, NUMEL, seed=2), [rank])


def test_a_step_in_which_something_is_averaged_starts_the_count_anew() -> None:
    with _settled((0, 1)) as job:
        for seed in range(6):
            job.trouble(lambda loss=1.0 if seed % 2 else 0.0: Trouble(seed=0, loss=loss, types=ROWS))
            assert not any(outcome.error for outcome in _step(job, seed))


def test_a_job_whose_only_owner_is_away_says_so() -> None:
    with _settled((2,)) as job:
        job.world.stop(2, 0, 100 * S)
        inputs = gradients("U", 3, NUMEL, seed=0)
        assert not any(outcome.error for _, outcome in job.allreduce(inputs, [0, 1]))
        for _, outcome in job.allreduce(inputs, [0, 1]):
            assert "all rows belong to rank 2, of which nothing came" in str(outcome.error)


def test_a_rank_that_is_left_alone_by_all_owners_says_so() -> None:
    """It went on with zeros, since no majority is left that could agree on another map. Rules: clock-15, clock-37."""
    with _settled((0, 1)) as job:
        for left in (0, 1):
            job[2].job.membership.bye(left, job[2].job.marks.published)
        inputs = gradients("U", 3, NUMEL, seed=0)
        assert job.allreduce(inputs, [2])[0][1].error is None
        error = job.allreduce(inputs, [2])[0][1].error
        assert "all rows belong to ranks 0-1, gone from the job" in str(error)


def test_a_rank_behind_whose_rows_are_gone_follows_the_others() -> None:
    """It ended with an error after a stop, though the others average all that they send. Rule: clock-37."""
    with _settled((0, 1)) as job:
        inputs = gradients("U", 3, NUMEL, seed=0)
        job[0].trouble(partial(_but_results, 2))
        job.world.change(2, 0, cut=True)
        for _ in range(6):
            assert not any(outcome.error for _, outcome in job.allreduce(inputs, [0, 1]))
        job.world.change(2, 0, cut=False)
        job[1].trouble(lambda to, packets: [] if to == 2 else packets)
        outcomes = [job.allreduce(inputs, [2])[0][1] for _ in range(4)]
        assert all(outcome.failed_groups and not outcome.skipped for outcome in outcomes)
        assert not any(outcome.error for outcome in outcomes)


def test_steps_in_which_all_abstain_end_no_job() -> None:
    """The loss scale overflows several times running. Rules: clock-25, clock-37."""
    ill = [np.full(NUMEL, np.inf, np.float32)] * 3
    with _settled((0, 1), patient(share_rows=False)) as job:
        for _ in range(5):
            outcomes = [outcome for _, outcome in job.allreduce(ill)]
            assert all(one.void and not one.minority and one.error is None for one in outcomes)


def test_who_abstains_alone_trains_nothing() -> None:
    """A rank that is cut off, and whose gradient is not finite, stepped by zeros. Rule: clock-38."""
    ill = [np.full(NUMEL, np.inf, np.float32)] * 3
    with _settled((0, 1)) as job:
        job.world.change(2, 0, cut=True)
        for _ in range(5):
            ((_, outcome),) = job.allreduce(ill, [2])
            assert outcome.minority


def test_who_is_cut_off_and_owns_nothing_goes_on() -> None:
    """A rank without a majority goes on, and is warned. Rule: clock-15."""
    with _settled((0, 1)) as job:
        job.world.change(2, 0, cut=True)
        for seed in range(4):
            assert not any(outcome.error for outcome in _step(job, seed))
        job.world.change(2, 0, cut=False)
        for seed in range(20):
            outcomes = _step(job, seed)
        assert not any(outcome.error or outcome.missing for outcome in outcomes)


# -- a step in which fewer than a majority of the ranks have part is void (clock-38) -----------------------------------


#: Steps in which all is well before, and is again after.
CALM = 6
#: How long the trouble lasts, ns.
APART = 3 * S


def _cut(job: World, parts: str) -> None:
    """Cuts the network into ``parts``: ranks of one part hear each other."""
    for part in parts.split("|"):
        for rank in map(int, part):
            _wire(job.nodes[rank]).trouble = lambda to, packets, part=part: packets if str(to) in part else []
    job.fabric.at(job.fabric.now + APART, lambda: _mend(job.nodes))


def _mend(nodes: Iterable[Rank]) -> None:
    for node in nodes:
        _wire(node).trouble = None


def _wire(node: Rank) -> Wire:
    return cast(Wire, node.engine.job.datapath.socket)  # type: ignore[attr-defined]


def _unplug(job: World, ranks: str) -> None:
    for rank in map(int, ranks):
        job.change(rank, 0, cut=True)
        job.change(rank, APART, cut=False)


def _stop(job: World, ranks: str) -> None:
    for rank in map(int, ranks):
        job.stop(rank, 0, APART)


def _end(job: World, ranks: str) -> None:
    """The connections to these ranks end, and are refused."""
    for rank in map(int, ranks):
        job.kill(rank, 0)
        for node in job.alive:
            node.engine.died(rank)


def _leave(job: World, ranks: str) -> None:
    for rank in map(int, ranks):
        job.kill(rank, 0)
        for node in job.alive:
            node.engine.job.membership.bye(rank, op_label(node.step, 0))


#: Ranks, what happens to whom, and who trains meanwhile.
CASES: list[tuple[int, Callable[[World, str], None], str, str]] = [
    (2, _stop, "1", ""),
    (2, _cut, "0|1", ""),
    (2, _end, "1", "0"),
    (2, _leave, "1", "0"),
    (3, _stop, "2", "01"),
    (3, _stop, "12", ""),
    (3, _cut, "0|12", "12"),
    (3, _cut, "0|1|2", ""),
    (4, _stop, "3", "012"),
    (4, _stop, "02", ""),
    (4, _cut, "012|3", "012"),
    (4, _cut, "01|23", ""),
    (4, _end, "23", "01"),
]


def _pass(
    job: World, how: Callable[[World, str], None], whom: str, train: str, awake: set[int]
) -> tuple[dict[int, int], int]:
    """Runs ``job`` before, while and after ranks are apart: of those awake, only who trains has ops that are not void.

    Returns:
        Ops that each rank made while they were apart, and the first step after it.
    """
    job.start()
    job.until(lambda: job.nodes[0].step >= CALM, LONGEST)
    begun, since = {node.rank: node.step + 1 for node in job.nodes}, job.fabric.now
    how(job, whom)
    job.until(lambda: job.fabric.now >= since + APART - 200 * MS, LONGEST)
    ended = {node.rank: node.step - 1 for node in job.nodes}
    for rank in awake:
        void = {done.outcome.minority for done in job.nodes[rank].over if begun[rank] < done.step <= ended[rank]}
        assert void == {str(rank) not in train}, rank
    job.until(lambda: job.fabric.now >= since + APART + 1 * S, LONGEST)
    job.until(lambda: len({node.step for node in job.alive}) == 1, LONGEST)
    again = job.nodes[0].step
    job.steps = again + CALM
    job.finish()
    return {rank: ended[rank] - begun[rank] for rank in begun}, again


@pytest.mark.parametrize(("ranks", "how", "whom", "train"), CASES)
def test_who_hears_no_majority_trains_nothing(
    ranks: int, how: Callable[[World, str], None], whom: str, train: str
) -> None:
    """Of the ops that begin while ranks are apart; after it all train again. Rules: clock-14, clock-38."""
    with World(ranks, 1, plan=PLAN, steps=1 << 30, share_rows=True, **SHORT) as job:
        told: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
        for node in job.nodes:
            node.engine.job.events.emit = lambda kind, *_, of=node.rank, **__: told[of].append(kind)  # type: ignore
        awake = set(range(ranks)) - set(map(int, whom if how is not _cut else ""))
        made, again = _pass(job, how, whom, train, awake)
        for rank in awake - set(map(int, train)):  # they do not leave their data behind at full speed
            assert made[rank] <= 1.2 * APART / (SHORT["start_max"] + PLAN.compute)
        for node in job.alive:
            assert not any(done.outcome.minority or done.outcome.missed for done in node.over if done.step > again + 1)
            assert told[node.rank].count("no_quorum") == told[node.rank].count("quorum") <= 1
            count = sum(done.outcome.minority for done in node.over)
            assert node.engine.job.counters["ops_minority"] == count


@pytest.mark.parametrize(("how", "whom", "train"), [(_stop, "2", "01"), (_stop, "12", ""), (_unplug, "2", "01")])
def test_a_switch_is_believed_by_its_counts_of_contributors(
    how: Callable[[World, str], None], whom: str, train: str
) -> None:
    """It sums for everybody, and flags nothing. Rules: clock-28, clock-38."""
    with World(3, 1, plan=PLAN, steps=1 << 30, switch=switch_of(3), **SHORT) as job:
        _, again = _pass(job, how, whom, train, {0, 1, 2} - set(map(int, whom if how is _stop else "")))
        assert not any(done.outcome.minority for node in job.alive for done in node.over if done.step > again + 1)
