"""Rows stop arriving where small packets do: bursts that vanish leave one by one, and a smaller MTU ends the job."""

from __future__ import annotations

import os

import pytest

from sim.team import SimTeam, sim_team
from support import Trouble
from tailbound.errors import TransportError
from tailbound.wire.schema import HEADER_BYTES
from tailbound_lab.simulate.fabric import MS, S

RANKS, WIDTH = 3, 64
NUMEL = 2 * 64 * WIDTH
LEARNED = {"width": WIDTH, "insist": 200 * MS}


def alone(to: int, packets: list[bytes]) -> list[bytes]:
    """Segmentation offload that takes bursts and sends nothing."""
    return packets if len(packets) == 1 else []


def small(to: int, packets: list[bytes]) -> list[bytes]:
    """A path that takes no packet as wide as a row."""
    return [packet for packet in packets if len(packet) < HEADER_BYTES + WIDTH]


def crowded(to: int, packets: list[bytes]) -> list[bytes]:
    """A queue that has room for small packets, and for one of a burst."""
    return packets[:1] if len(packets) > 1 else small(to, packets)


def steps(job: SimTeam, ops: int) -> None:
    for op in range(ops):
        job.averaged(NUMEL, op)
        job.go(20 * MS)


@pytest.mark.parametrize("ranks", [{1}, {0, 1, 2}])
def test_bursts_that_vanish_in_the_middle_of_a_job_leave_one_by_one(ranks: set[int]) -> None:
    with sim_team(RANKS, LEARNED) as job:
        job.warm_up(NUMEL, 10)
        for rank in ranks:
            job[rank].trouble(alone)
        steps(job, 20)
        job.warm_up(NUMEL, 20)
        for rank in range(RANKS):
            plain = set(range(RANKS)) - {rank} if rank in ranks else set()
            assert job[rank].job.sender.plain == plain
            told = [e.fields for e in job[rank].job.events.recent() if e.name == "bursts_lost"]
            assert bool(told) == (rank in ranks)
            assert all(fields["kernel"] == os.uname().release for fields in told)


def test_a_path_whose_mtu_shrinks_ends_the_job_on_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    with sim_team(RANKS, LEARNED) as job:
        job.warm_up(NUMEL, 10)
        job[1].trouble(small)
        while not any(member._engine._error for member in job.communicators):
            steps(job, 1)
            assert job.now < 10 * S
        job.go(5 * S)
        for member in job.communicators:
            assert f"packets of {28 + HEADER_BYTES + WIDTH} bytes" in str(member._engine._error)
            with pytest.raises(TransportError, match="MTU"):
                job.averaged(NUMEL, 0, [member.config.rank])
        assert len([r for r in caplog.records if "MTU" in r.getMessage()]) == RANKS  # each says so once


@pytest.mark.parametrize("rank", [None, 1])
def test_losses_are_taken_for_neither(rank: int | None) -> None:
    """Full queues of one rank that small packets fit in ended the job for its MTU."""
    with sim_team(RANKS, LEARNED) as job:
        job.warm_up(NUMEL, 10)
        job.trouble(lambda: Trouble(3, loss=0.2)) if rank is None else job[rank].trouble(crowded)
        end = job.now + 5 * S
        while job.now < end:
            steps(job, 1)
        if rank is not None:
            assert job[rank].job.paths.trials._sent > 8
        else:
            assert not any(member.job.sender.plain for member in job.communicators)
        assert not any(member._engine._error for member in job.communicators)
