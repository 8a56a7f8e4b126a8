"""What ranks learn of time and links, in virtual time: deadlines, grants and pacing."""

from __future__ import annotations

import contextlib

import pytest

from sim.team import sim_team
from support import hasty
from tailbound.transport.config import FLOOR
from tailbound.transport.deadline import WARM_UP_OPS
from tailbound_lab.simulate.fabric import MS, Terms
from tailbound_lab.simulate.layouts import arrange
from tailbound_lab.simulate.ports import Switching
from tailbound_lab.simulate.steps import Team

RANKS, WIDTH = 3, 64
NUMEL = 4 * 64 * WIDTH
LEARNED = {"width": WIDTH, "ring_mib": 1.0, "stage_max": 5_000 * MS}
#: What every op of a rank takes to compute, ns, more or less.
COMPUTE = (5 * MS, 12 * MS, 8 * MS)


def test_deadlines_are_learned_advertised_and_applied_and_cut_off_nothing_usual() -> None:
    """Rules: clock-6, clock-26."""
    with sim_team(RANKS, LEARNED) as job:
        dice = job.world.fabric.random
        assert [c.job.deadlines.advertised for c in job.communicators] == [5_000 * MS] * RANKS
        for op in range(WARM_UP_OPS + 36):
            late = {rank: int(mean * dice.uniform(0.8, 1.2)) for rank, mean in enumerate(COMPUTE)}
            results = job.averaged(NUMEL, op, late=late)[1]
            for _, outcome in results if op >= WARM_UP_OPS + 12 else []:
                assert (outcome.delivered, outcome.deadline_hits) == (outcome.expected, 0)
        for c in job.communicators:
            deadlines = c.job.deadlines
            assert deadlines.warm(deadlines.largest)
            assert FLOOR <= deadlines.advertised < 200 * MS
            assert FLOOR <= deadlines.stage_two(deadlines.largest) < 200 * MS
            for peer in c.job.peers:  # of the last op, in units of the header
                told = int(c.job.store.peer_states[peer]["deadline"]) * 64_000
                assert told == pytest.approx(job[peer].job.deadlines.advertised, rel=0.5)


def test_a_layout_that_changes_is_never_warm() -> None:
    """Rule: clock-5."""
    with sim_team(2, LEARNED) as job:
        for op in range(12):
            job.averaged(NUMEL + 64 * WIDTH * op, op)
        for c in job.communicators:
            assert c.job.deadlines.advertised == 5_000 * MS
            assert not c.job.pending


def test_where_some_rows_are_always_lost_a_deadline_leaves_time_to_ask_for_them() -> None:
    """An answer takes a round trip of 30 ms, and all rows that are not lost come within 3. Rule: clock-5."""
    terms = Terms(latency=15 * MS, loss=0.03)
    with sim_team(RANKS, LEARNED | {"share_rows": False}, terms=terms) as job:
        outcomes = [outcome for op in range(120) for _, outcome in job.averaged(NUMEL, op % 2)[1]][60 * RANKS :]
        assert sum(o.delivered for o in outcomes) > 0.9995 * sum(o.expected for o in outcomes)
        assert all(c.job.deadlines.advertised < 500 * MS for c in job.communicators)


# -- a grant goes out, is obeyed and ends, and marks slow senders before a queue drops (clock-24) ----------------------


def test_a_receiver_that_has_recovered_frees_its_senders() -> None:
    """Rule: clock-24."""
    with sim_team(4, hasty(width=64, ring_mib=1.0)) as job:
        senders = job.communicators[1:]

        def ops(count: int) -> set[float]:
            for op in range(count):
                job.averaged(64 * 64, op)
            return {member.stats()["traffic"]["grants"]["0"] for member in senders}

        assert ops(4) == {1.0}
        job[0].job.flow.incast.taken = 1.0
        assert ops(4) == {1 / 3}
        assert ops(80) == {1.0}
        assert not any(member.job.flow.queue.pacer.limited for member in senders)


def test_marks_of_a_shallow_queue_slow_its_senders() -> None:
    """Rows of the rank that is late meet those of others. Rule: clock-24."""
    switching = Switching(rate=10**8, buffer=64 << 10, mark=16 << 10)
    with contextlib.closing(Team(arrange("flat", 4, 1 << 17), switching, 1)) as team:
        team.late = 4 * MS
        steps = [team.step() for _ in range(4)]
        assert any(node.engine.job.flow.snapshot()["slowed"] for node in team.worlds[0].nodes)
    assert sum(step.marks for step in steps) > 0
    assert not any(step.dropped for step in steps)
