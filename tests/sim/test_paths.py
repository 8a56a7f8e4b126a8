"""What ranks learn of time and links, in virtual time: deadlines, lost bursts and a smaller MTU."""

from __future__ import annotations

import errno
import os

import pytest

from sim.team import SimTeam, sim_team
from support import Trouble
from tailbound.collective.paths import Paths
from tailbound.errors import TransportError
from tailbound.transport.config import FLOOR
from tailbound.transport.deadline import WARM_UP_OPS
from tailbound.wire.schema import HEADER_BYTES
from tailbound_lab.simulate.fabric import MS, S, Terms

RANKS, WIDTH = 3, 64
NUMEL = 4 * 64 * WIDTH
LEARNED = {"width": WIDTH, "ring_mib": 1.0, "stage_max": 5_000 * MS}
INSISTING = {"width": WIDTH, "insist": 200 * MS}
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


# -- rows stop arriving where small packets do ------------------------------------------------------------------------


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
    with sim_team(RANKS, INSISTING) as job:
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
    with sim_team(RANKS, INSISTING) as job:
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


@pytest.mark.parametrize("refuses", [False, True])
def test_what_the_own_system_refuses_is_told_and_ends_the_job_if_rows_are_too_long_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuses: bool
) -> None:
    with sim_team(RANKS, INSISTING) as job:
        job.warm_up(NUMEL, 3)
        if refuses:
            send = Paths._send
            monkeypatch.setattr(Paths, "_send", lambda *of: errno.EMSGSIZE if small(0, of[3]) == [] else send(*of))
        for number in (errno.EPERM, errno.EMSGSIZE):
            job[1].job.sender.refuse(0, number)
        job.go(2 * S)
        told = [e.fields for e in job[1].job.events.recent() if e.name == "cannot_send"]
        assert [each["peers"] for each in told] == [[0], [0]]
        for member in job.communicators:
            error = str(member.job.paths.error)
            assert ("no longer reach rank 0" in error) == refuses
        if not refuses:
            steps(job, 1)
    assert "nft list ruleset" in caplog.text


@pytest.mark.parametrize("rank", [None, 1])
def test_losses_are_taken_for_neither(rank: int | None) -> None:
    """Full queues of one rank that small packets fit in ended the job for its MTU."""
    with sim_team(RANKS, INSISTING) as job:
        job.warm_up(NUMEL, 10)
        job.trouble(lambda: Trouble(3, loss=0.2)) if rank is None else job[rank].trouble(crowded)
        end = job.now + 5 * S
        while job.now < end:
            steps(job, 1)
        if rank is not None:
            assert job[rank].job.sender.plain
        else:
            assert not any(member.job.sender.plain for member in job.communicators)
        assert not any(member._engine._error for member in job.communicators)
