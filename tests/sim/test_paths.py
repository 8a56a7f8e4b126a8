"""Rows stop arriving where small packets do: bursts that vanish leave one by one, and a smaller MTU ends the job."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

import pytest

from sim.team import SimTeam, sim_team
from support import Trouble, exact_mean, gradients, nmse
from tailbound.errors import TransportError
from tailbound.wire.schema import HEADER_BYTES
from tailbound_lab.simulate.fabric import MS, S

RANKS, WIDTH = 3, 64
NUMEL = 2 * 64 * WIDTH
LEARNED = {"width": WIDTH, "insist": 200 * MS}
INPUTS = gradients("U", RANKS, NUMEL, seed=1)
EXACT = exact_mean(INPUTS)

Send = Callable[[int, list[bytes]], list[bytes]]


def meddle(job: SimTeam, ranks: Collection[int], send: Send | None) -> None:
    """``send``: of (to whom, packets of a burst) what leaves ``ranks``."""
    for rank in ranks:
        job[rank].trouble(send)


def alone(to: int, packets: list[bytes]) -> list[bytes]:
    """Segmentation offload that takes bursts and sends nothing."""
    return packets if len(packets) == 1 else []


def small(to: int, packets: list[bytes]) -> list[bytes]:
    """A path that takes no packet as wide as a row."""
    return [packet for packet in packets if len(packet) < HEADER_BYTES + WIDTH]


def errors_of(job: SimTeam, ops: int) -> list[list[float]]:
    """NMSE by op and rank."""
    found = []
    for _ in range(ops):
        found.append([nmse(out, EXACT) for out, _ in job.allreduce(INPUTS)])
        job.go(20 * MS)
    return found


@pytest.mark.parametrize("ranks", [{1}, {0, 1, 2}])
def test_bursts_that_vanish_in_the_middle_of_a_job_leave_one_by_one(ranks: set[int]) -> None:
    with sim_team(RANKS, LEARNED) as job:
        assert max(map(max, errors_of(job, 10))) < 0.01
        meddle(job, ranks, alone)
        errors_of(job, 20)
        assert max(map(max, errors_of(job, 20))) < 0.01
        for rank in range(RANKS):
            plain = set(range(RANKS)) - {rank} if rank in ranks else set()
            assert job[rank].job.sender.plain == plain
            told = [e.fields for e in job[rank].job.events.recent() if e.name == "bursts_lost"]
            assert bool(told) == (rank in ranks)
            assert all(fields["kernel"] == os.uname().release for fields in told)


@pytest.mark.parametrize("narrow", [{1}])
def test_a_path_whose_mtu_shrinks_ends_the_job_on_all_ranks(narrow: set[int], caplog: pytest.LogCaptureFixture) -> None:
    with sim_team(RANKS, LEARNED) as job:
        errors_of(job, 10)
        meddle(job, narrow, small)
        begun, said = job.now, {}
        while len(said) < RANKS and job.now < begun + 8 * S:
            for rank in set(range(RANKS)) - said.keys():
                error = job[rank]._engine._error
                if error is not None:
                    said[rank] = str(error)
            if said:
                job.go(100 * MS)
            else:
                errors_of(job, 1)
        assert set(said) == set(range(RANKS))
        for text in said.values():
            assert f"packets of {28 + HEADER_BYTES + WIDTH} bytes" in text
            assert "MTU" in text
        job.go(3 * S)
        assert len([r for r in caplog.records if "MTU" in r.getMessage()]) == RANKS  # each says so once
        with pytest.raises(TransportError, match="MTU"):
            job[0].allreduce(INPUTS[0].copy())


def crowded(to: int, packets: list[bytes]) -> list[bytes]:
    """A queue that has room for small packets, and for one of a burst."""
    return packets[:1] if len(packets) > 1 else small(to, packets)


def test_a_path_that_takes_some_wide_packets_has_its_mtu() -> None:
    """Full queues that small packets fit in ended the job for its MTU."""
    with sim_team(RANKS, LEARNED) as job:
        errors_of(job, 10)
        meddle(job, {1}, crowded)
        begun = job.now
        while job.now < begun + 5 * S:
            errors_of(job, 1)
        meddle(job, {1}, None)
        assert job[1].job.paths.trials._sent > 8
        assert not any(member._engine._error for member in job.communicators)


@pytest.mark.parametrize("loss", [0.2])
def test_losses_are_taken_for_neither(loss: float) -> None:
    with sim_team(RANKS, LEARNED) as job:
        job.trouble(lambda: Trouble(3, loss=loss))
        errors_of(job, 5)
        assert not any(member._engine._error for member in job.communicators)
        assert not any(member.job.sender.plain for member in job.communicators)
