"""Learned deadlines in whole jobs over udp: warm-up, advertising, late rows that leave their stamps."""

from __future__ import annotations

import pytest

from support import MS, Team, gradients, team
from tailbound.transport.deadline import LEAST, WARM_UP_OPS

RANKS, NUMEL = 3, 4 * 64 * 256
LEARNED = {"width": 256, "ring_mib": 4.0, "stage_max": 5_000 * MS}


def test_deadlines_are_learned_advertised_and_applied() -> None:
    """Rules: clock-6, clock-26."""
    with team(RANKS, LEARNED) as job:
        for communicator in job.communicators:
            assert communicator.job.deadlines.advertised == 5_000 * MS
        inputs = gradients("U", RANKS, NUMEL, seed=1)
        for _ in range(WARM_UP_OPS + 12):
            job.allreduce(inputs)
        for _ in range(3):  # these deadlines are short: a thread that does not run for longer costs most of an op
            outcomes = [outcome for _ in range(12) for _, outcome in job.allreduce(inputs)]
            if sum(o.delivered for o in outcomes) >= 0.9 * sum(o.expected for o in outcomes):
                break
        else:
            pytest.fail("learned deadlines cut off what comes as a rule")
        for communicator in job.communicators:
            deadlines = communicator.job.deadlines
            assert deadlines.warm(deadlines.largest)
            assert LEAST <= deadlines.advertised < 5_000 * MS
            assert LEAST <= deadlines.stage_two(deadlines.largest) < 5_000 * MS
        for _ in range(10):  # it changes from op to op, and the others hear of it with the next one
            if all(_told(job)):
                break
            job.allreduce(inputs)
        else:
            pytest.fail("what the others have heard is something else")


def _told(job: Team) -> list[bool]:
    """By pair of ranks, whether the one knows about what the other advertises."""
    told = []
    for communicator in job.communicators:
        states = communicator.job.store.peer_states
        for peer in communicator.job.peers:
            own = job[peer].job.deadlines.advertised
            told.append(int(states[peer]["deadline"]) * 64_000 == pytest.approx(own, rel=0.5, abs=20 * MS))
    return told


def test_a_layout_that_changes_is_never_warm() -> None:
    with team(2, LEARNED) as job:
        for op in range(12):
            job.allreduce(gradients("U", 2, NUMEL + 64 * 256 * op, seed=op))
        for communicator in job.communicators:
            assert communicator.job.deadlines.advertised == 5_000 * MS
            assert not communicator.job.pending


def test_given_deadlines_are_advertised_from_the_start() -> None:
    with team(2, LEARNED | {"deadline_1": 640 * MS, "deadline_2": 500 * MS}) as job:
        job.allreduce(gradients("U", 2, NUMEL, seed=1))
        for communicator in job.communicators:
            other = communicator.job.peers[0]
            assert int(communicator.job.store.peer_states[other]["deadline"]) == 10_000
