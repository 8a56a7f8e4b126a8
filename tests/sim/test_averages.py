"""A job that averages nothing ends with an error, and steps without a majority are void, in virtual time."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from sim.engine import Plan, World, switch_of
from sim.team import SimTeam, sim_team
from support import Trouble, gradients, hasty
from tailbound.errors import TransportError
from tailbound.wire.schema import PacketType, op_label
from tailbound_lab.simulate.fabric import MS, S

# -- a job whose steps average nothing ends (clock-37) -----------------------------------------------------------------

NUMEL = 64 * 256
INPUTS = gradients("U", 3, NUMEL, seed=0)
ILL = [np.full(NUMEL, np.inf, np.float32)] * 3
EVERYBODY = (0, 1, 2)
_PATH = f"rows are lost, .* IP packets of {20 + 8 + 64 + 256} bytes .* TAILBOUND_MTU"


def _no_rows(job: SimTeam, step: int) -> None:
    rows = frozenset({PacketType.CONTRIBUTION, PacketType.RESULT})
    job.trouble(lambda: Trouble(seed=0, loss=1.0, types=rows))


def _every_other(job: SimTeam, step: int) -> None:
    _no_rows(job, step) if step % 2 else job.trouble(lambda: Trouble(seed=0))


def _owner_stops(job: SimTeam, step: int) -> None:
    job.world.stop(2, 100 * S)


def _owners_leave(job: SimTeam, step: int) -> None:
    for left in (0, 1):
        job[2].job.membership.bye(left, job[2].job.marks.published)


def _cut_off(job: SimTeam, step: int) -> None:
    job.world.change(2, cut=True)


def _left_behind(job: SimTeam, step: int) -> None:
    """Rank 2 lacks six steps, and no rank sends it a result of them."""
    if step:
        return
    job[0].trouble(lambda to, sent: [each for each in sent if to != 2 or each[1] != PacketType.RESULT])
    job.world.change(2, cut=True)
    for _ in range(6):
        assert not any(outcome.error for _, outcome in job.allreduce(INPUTS, [0, 1]))
    job.world.change(2, cut=False)
    job[1].trouble(lambda to, sent: [] if to == 2 else sent)


#: Owners of rows, what happens before each step, who launches what, how ops end, and with which words the job does.
_ENDS = {
    "two own rows, and none gets through": ((0, 1), _no_rows, EVERYBODY, INPUTS, {}, _PATH),
    "one owns all rows, and none gets through": ((2,), _no_rows, EVERYBODY, INPUTS, {}, _PATH),
    "the only owner is away": ((2,), _owner_stops, (0, 1), INPUTS, {"minority": True}, ""),
    "all owners have left": ((0, 1), _owners_leave, (2,), INPUTS, {}, "belong to ranks 0-1, gone from the job"),
    "no rows get through every other step": ((0, 1), _every_other, EVERYBODY, INPUTS, {}, ""),
    "the rows of a rank behind are gone": (
        (0, 1), _left_behind, (2,), INPUTS, {"failed_groups": True, "skipped": False}, "",
    ),
    "all abstain": (
        (0, 1), lambda job, step: None, EVERYBODY, ILL, {"void": True, "minority": False}, "",
    ),
    "a rank that owns nothing is cut off": ((0, 1), _cut_off, EVERYBODY, INPUTS, {}, ""),
    "a rank is cut off and abstains": ((0, 1), _cut_off, (2,), ILL, {"minority": True}, ""),
}  # fmt: skip


@pytest.mark.parametrize(("owners", "happens", "who", "inputs", "ends", "words"), _ENDS.values(), ids=_ENDS)
def test_a_job_ends_after_two_steps_that_average_nothing(
    owners: tuple[int, ...], happens: Callable[[SimTeam, int], None], who: tuple[int, ...], inputs: list[np.ndarray],
    ends: dict[str, bool], words: str,
) -> None:  # fmt: skip
    """Rules: clock-15, clock-25, clock-37, clock-38."""
    with sim_team(3, hasty(share_rows=False)) as job:
        for seed in range(40):
            if seed == 4:
                assert job.world.propose(owners)
            job.right(NUMEL, seed)
            job.go(20 * MS)
        assert job.placed_by(owners)
        errors: dict[int, str] = {}
        for step in range(4):
            happens(job, step)
            left = [rank for rank in who if rank not in errors]
            for rank, (_, outcome) in zip(left, job.allreduce(inputs, left), strict=True):
                assert {name: bool(getattr(outcome, name)) for name in ends} == ends
                errors |= {rank: str(outcome.error)} if outcome.error else {}
            job.go(20 * MS)
            if len(errors) == len(who):
                break
        assert sorted(errors) == (list(who) if words else [])
        for rank, error in errors.items():  # a rank that still waits for what a trial tells ends a step later
            assert re.search(rf"^rank {rank}: steps 40 to 4[12] .*{words}", error)
            with pytest.raises(TransportError, match=r"steps 40 to 4[12]"):
                job.allreduce(inputs, [rank])


def test_an_owner_that_leaves_steps_in_flight_behind_ends_no_job() -> None:
    """By its marks it has sent them all, and nothing came. Rules: clock-20, clock-37."""
    with sim_team(2, hasty(ring_mib=1 / 8)) as job:
        job.warm_up(NUMEL)
        while not job[0].lost:
            job.averaged(NUMEL, 0, [1])
        flying = [job.start(INPUTS[:2], [1]) for _ in range(2)]
        job.go(50 * MS)
        assert job[0].jump()
        assert not any(outcome.error for each in flying for _, outcome in job.finish(each))
        job.right(NUMEL)


# -- a step in which fewer than a majority of the ranks have part is void (clock-38) -----------------------------------

#: Steps in which all is well before, and is again after; how long the trouble lasts, and anything at all, ns.
CALM, APART, LONGEST = 6, 3 * S, 100 * S
#: One bucket a step, and steps long enough for a map to begin three steps after it is settled.
PLAN = Plan((NUMEL,), compute=50 * MS)
#: Ops that lack rows or a majority end soon, in warm-up as well.
SHORT = {"stage_max": 200 * MS, "start_max": 100 * MS}
How = Callable[[World, int], None]


def _stop(job: World, rank: int) -> None:
    job.stop(rank, APART)


def _unplug(job: World, rank: int) -> None:
    job.unplug(rank, APART)


def _end(job: World, rank: int) -> None:
    """Connections to the rank end, and are refused."""
    job.kill(rank)
    for node in job.alive:
        node.engine.died(rank)


def _leave(job: World, rank: int) -> None:
    job.kill(rank)
    for node in job.alive:
        node.engine.job.membership.bye(rank, op_label(node.step, 0))


def _cut(job: World, whom: str) -> None:
    """Ranks hear only each other in every part of ``whom``."""
    for part in whom.split("|"):
        for rank in map(int, part):
            job.nodes[rank].wire.trouble = lambda to, packets, part=part: packets if str(to) in part else []

    def mend() -> None:
        for node in job.nodes:
            node.wire.trouble = None

    job.fabric.at(job.fabric.now + APART, mend)


#: Ranks, what happens to whom, who trains meanwhile, and whether a switch sums, which flags nothing (clock-28).
_PARTS: list[tuple[int, How | None, str, str, bool]] = [
    (2, _stop, "1", "", False), (2, None, "0|1", "", False), (2, _end, "1", "0", False), (2, _leave, "1", "0", False),
    (3, _stop, "2", "01", False), (3, _stop, "12", "", False), (3, None, "0|12", "12", False),
    (3, None, "0|1|2", "", False), (4, _stop, "3", "012", False), (4, _stop, "02", "", False),
    (4, None, "012|3", "012", False), (4, None, "01|23", "", False), (4, _end, "23", "01", False),
    (3, _stop, "2", "01", True), (3, _stop, "12", "", True), (3, _unplug, "2", "01", True),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "how", "whom", "train", "switched"), _PARTS)
def test_a_rank_that_hears_no_majority_trains_nothing(
    ranks: int, how: How | None, whom: str, train: str, switched: bool
) -> None:
    """Of the ops that begin while ranks are apart; after it all train again. Rules: clock-14, clock-28, clock-38."""
    switch = switch_of(ranks) if switched else None
    with World(ranks, 1, plan=PLAN, steps=1 << 30, share_rows=not switched, switch=switch, **SHORT) as job:
        told: list[list[str]] = [[] for _ in range(ranks)]
        for node, kinds in zip(job.nodes, told, strict=True):
            node.engine.job.events.emit = lambda kind, *_, kinds=kinds, **__: kinds.append(kind)  # type: ignore
        job.start()
        job.until(lambda: job.nodes[0].step >= CALM, LONGEST)
        begun, since = [node.step + 1 for node in job.nodes], job.fabric.now
        for rank in map(int, whom if how else ""):
            how(job, rank)  # type: ignore[misc]
        if not how:
            _cut(job, whom)
        job.until(lambda: job.fabric.now >= since + APART - 200 * MS, LONGEST)
        for rank in range(ranks):
            ended, trains = job.nodes[rank].step - 1, str(rank) in train
            if how in (None, _unplug) or str(rank) not in whom:
                void = {done.outcome.minority for done in job.nodes[rank].over if begun[rank] < done.step <= ended}
                assert void == {not trains}, rank
                if not trains:  # it does not leave its data behind at full speed
                    assert ended - begun[rank] <= 1.2 * APART / (SHORT["start_max"] + PLAN.compute)
        job.until(lambda: job.fabric.now >= since + APART + 1 * S, LONGEST)
        job.until(lambda: len({node.step for node in job.alive}) == 1, LONGEST)
        again = job.nodes[0].step
        job.steps = again + CALM
        job.finish()
        for node in job.alive:
            assert not any(done.outcome.minority or done.outcome.missed for done in node.over if done.step > again + 1)
            assert told[node.rank].count("no_quorum") == told[node.rank].count("quorum") <= 1
            count = sum(done.outcome.minority for done in node.over)
            assert node.engine.job.counters["ops_minority"] == count
