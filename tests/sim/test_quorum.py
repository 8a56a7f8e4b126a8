"""A step in which fewer than a majority of the ranks have part is void, in virtual time (clock-38)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import pytest

from sim.engine import Plan, Rank, World, switch_of
from tailbound.wire.schema import op_label
from tailbound_lab.simulate.fabric import MS, S
from tailbound_lab.simulate.machine import Wire

PLAN = Plan((64 * 256,), compute=50 * MS)
#: Ops without a majority end soon, in warm-up as well.
SHORT = {"stage_max": 200 * MS, "start_max": 100 * MS}
#: Of virtual time, ns; and steps in which all is well before, and is again after.
LONGEST, CALM = 100 * S, 6
#: How long the trouble lasts, ns.
AWAY = 3 * S


def _cut(job: World, parts: str) -> None:
    """Cuts the network into ``parts``: ranks of one part hear each other."""
    for part in parts.split("|"):
        for rank in map(int, part):
            _wire(job.nodes[rank]).trouble = lambda to, packets, part=part: packets if str(to) in part else []
    job.fabric.at(job.fabric.now + AWAY, lambda: _mend(job.nodes))


def _mend(nodes: Iterable[Rank]) -> None:
    for node in nodes:
        _wire(node).trouble = None


def _wire(node: Rank) -> Wire:
    return cast(Wire, node.engine.job.datapath.socket)  # type: ignore[attr-defined]


def _unplug(job: World, ranks: str) -> None:
    for rank in map(int, ranks):
        job.change(rank, 0, cut=True)
        job.change(rank, AWAY, cut=False)


def _stop(job: World, ranks: str) -> None:
    for rank in map(int, ranks):
        job.stop(rank, 0, AWAY)


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
    job.until(lambda: job.fabric.now >= since + AWAY - 200 * MS, LONGEST)
    ended = {node.rank: node.step - 1 for node in job.nodes}
    for rank in awake:
        void = {done.outcome.minority for done in job.nodes[rank].over if begun[rank] < done.step <= ended[rank]}
        assert void == {str(rank) not in train}, rank
    job.until(lambda: job.fabric.now >= since + AWAY + 1 * S, LONGEST)
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
            assert made[rank] <= 1.2 * AWAY / (SHORT["start_max"] + PLAN.compute)
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
