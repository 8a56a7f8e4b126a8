"""What ranks learn of time and links, in virtual time: deadlines, grants and pacing.

Rules: clock-24.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from functools import partial

import numpy as np
import pytest

from sim.team import sim_team
from support import gradients, hasty
from tailbound.transport.config import FLOOR
from tailbound.transport.deadline import WARM_UP_OPS
from tailbound.transport.pace import PaceConfig
from tailbound.wire.packets import offset_of
from tailbound.wire.schema import HEADER_BYTES, PacketType
from tailbound_lab.lab.build import RateLimit
from tailbound_lab.simulate.engine import Done
from tailbound_lab.simulate.fabric import MS, Burst, S, Terms
from tailbound_lab.simulate.layouts import arrange
from tailbound_lab.simulate.ports import HEADERS, Switching
from tailbound_lab.simulate.steps import WIDTH as ROW
from tailbound_lab.simulate.steps import Team

# -- learned deadlines cut off nothing that comes as a rule ------------------------------------------------------------


RANKS, WIDTH = 3, 64
NUMEL = 4 * 64 * WIDTH
LEARNED = {"width": WIDTH, "ring_mib": 1.0, "stage_max": 5_000 * MS}
#: What every op of a rank takes to compute, ns, more or less.
COMPUTE = (5 * MS, 12 * MS, 8 * MS)


def test_deadlines_are_learned_advertised_and_applied() -> None:
    """Rules: clock-6, clock-26."""
    with sim_team(RANKS, LEARNED) as job:
        dice = job.world.fabric.random

        def late() -> dict[int, int]:
            return {rank: int(mean * dice.uniform(0.8, 1.2)) for rank, mean in enumerate(COMPUTE)}

        assert [c.job.deadlines.advertised for c in job.communicators] == [5_000 * MS] * RANKS
        inputs = gradients("U", RANKS, NUMEL, seed=1)
        for _ in range(WARM_UP_OPS + 12):
            job.allreduce(inputs, late=late())
        for _ in range(24):
            for _, outcome in job.allreduce(inputs, late=late()):
                assert outcome.delivered == outcome.expected
                assert outcome.deadline_hits == 0
        for c in job.communicators:
            deadlines = c.job.deadlines
            assert deadlines.warm(deadlines.largest)
            assert FLOOR <= deadlines.advertised < 200 * MS
            assert FLOOR <= deadlines.stage_two(deadlines.largest) < 200 * MS
            for peer in c.job.peers:  # what it was in the last op, in units of the header
                told = int(c.job.store.peer_states[peer]["deadline"]) * 64_000
                assert told == pytest.approx(job[peer].job.deadlines.advertised, rel=0.5)


def test_a_layout_that_changes_is_never_warm() -> None:
    with sim_team(2, LEARNED) as job:
        for op in range(12):
            job.allreduce(gradients("U", 2, NUMEL + 64 * WIDTH * op, seed=op))
        for c in job.communicators:
            assert c.job.deadlines.advertised == 5_000 * MS
            assert not c.job.pending


def test_where_some_rows_are_always_lost_a_deadline_leaves_time_to_ask_for_them() -> None:
    """An answer takes a round trip of 30 ms, and all rows that are not lost come within 3. Rule: clock-5."""
    terms = Terms(latency=15 * MS, loss=0.03)
    with sim_team(RANKS, LEARNED | {"share_rows": False}, terms=terms) as job:
        inputs = gradients("U", RANKS, NUMEL, seed=1)
        for _ in range(60):
            job.allreduce(inputs)
        expected = delivered = 0
        for _ in range(60):
            for _, outcome in job.allreduce(inputs):
                expected, delivered = expected + outcome.expected, delivered + outcome.delivered
        assert delivered > 0.9995 * expected
        assert all(c.job.deadlines.advertised < 500 * MS for c in job.communicators)


# -- a grant goes out, is obeyed and ends (clock-24) -------------------------------------------------------------------


GRANTED = 4
FEW = 64 * 64


def test_a_receiver_that_has_recovered_frees_its_senders() -> None:
    with sim_team(GRANTED, hasty(width=64, ring_mib=1.0)) as job:
        senders = job.communicators[1:]

        def ops(count: int) -> set[float]:
            for op in range(count):
                job.allreduce(gradients("U", GRANTED, FEW, seed=op))
            return {member.stats()["traffic"]["grants"]["0"] for member in senders}

        assert ops(4) == {1.0}
        job[0].job.flow.incast.taken = 1.0
        assert ops(4) == {1 / 3}
        assert ops(80) == {1.0}
        assert not any(member.job.flow.queue.pacer.limited for member in senders)


# -- no rank sends faster than its link is said to be, not even its first rows (clock-24) ------------------------------


ROWS, KIND = {PacketType.CONTRIBUTION, PacketType.RESULT}, offset_of("type")
SLOW = 12.5e6
#: What may lie in a host's own queue, and a burst more.
MOST = SLOW * (PaceConfig.ahead + PaceConfig.quantum) / S + ROW + HEADER_BYTES + HEADERS


@pytest.mark.parametrize("multicast", [False, True])
def test_nobody_is_faster_than_the_link_is_said_to_be(multicast: bool) -> None:
    """An interface ten times as fast, as a virtual machine's is; results over ``udp``, or once for all as with XDP."""
    team = Team(arrange("flat", 4, 1 << 18), Switching(rate=10**9), 1, rate=SLOW, multicast=multicast)
    send, left = team.network.send, defaultdict[int, list[tuple[int, int]]](list)

    def seen(burst: Burst) -> None:
        if burst.data[KIND] in ROWS:
            left[burst.source].append((team.network.clock, len(burst.data) + burst.count * HEADERS))
        send(burst)

    team.network.send = seen  # type: ignore[method-assign]
    for _ in range(3):
        step = team.step()
        assert step.delivered == step.expected
    team.close()
    assert len(left) == 4
    for bursts in left.values():
        waiting, before = 0.0, 0
        for now, size in bursts:
            waiting = max(0.0, waiting - (now - before) * SLOW / S) + size
            assert waiting <= MOST
            before = now


# -- buckets that follow each other without a pause take what the links need, and not twice that -----------------------


RATE, ENTRIES, BUCKETS, PAUSE = 250 * 10**6, 1_500_000, 4, 3 * MS


def as_in_the_lab(rate: int) -> Switching:
    """Ports and hosts with the buffers and token buckets that the lab's have."""
    port, host = RateLimit(rate), RateLimit(rate, host=True)
    credit, host_credit = (int(limit.burst / limit.rate * S) for limit in (port, host))
    return Switching(rate=rate, buffer=port.limit, credit=credit, host_credit=host_credit)


class Training:
    """Ranks each of which begins a step by itself as soon as it has all averages of the one before."""

    def __init__(self, ranks: int, steps: int, spread: int) -> None:
        self.team = Team(arrange("flat", ranks, ENTRIES), as_in_the_lab(RATE), 1)
        self.ends: list[list[int]] = [[] for _ in range(ranks)]
        self.missing = 0
        self._steps, self._spread, self._random = steps, spread, random.Random(1)
        self._outs = [[np.zeros(ENTRIES, np.float32) for _ in range(BUCKETS)] for _ in range(ranks)]

    def run(self) -> None:
        for rank in range(len(self.ends)):
            self._later(rank)
        self.team.network.run(lambda: all(len(ends) == self._steps for ends in self.ends), 600 * S)
        assert self.team.worlds[0].error is None

    def _later(self, rank: int) -> None:
        pause = PAUSE + self._random.randrange(self._spread + 1)
        self.team.network.at(self.team.network.clock + pause, partial(self._begin, rank))

    def _begin(self, rank: int) -> None:
        node, left = self.team.node(self.team.arrangement.parts[rank][0]), set(range(BUCKETS))

        def over(bucket: int, one: Done) -> None:
            self.missing += one.outcome.expected - one.outcome.delivered
            left.discard(bucket)
            if not left:
                self.ends[rank].append(self.team.network.clock)
                if len(self.ends[rank]) < self._steps:
                    self._later(rank)

        for bucket, out in enumerate(self._outs[rank]):
            node.submit(bucket, self.team.data(rank, 0), out, partial(over, bucket), last=bucket == BUCKETS - 1)


@pytest.mark.parametrize(
    ("ranks", "steps", "spread"),
    [
        (4, 4, 2 * MS),
        pytest.param(4, 5, 60 * MS, marks=pytest.mark.thorough),
        pytest.param(8, 6, 2 * MS, marks=pytest.mark.thorough),
    ],
    ids=["four ranks", "four that drift apart", "eight ranks"],
)
def test_what_waits_in_own_queues_slows_nobody_down(ranks: int, steps: int, spread: int) -> None:
    """No rank says how fast the links are, so sockets fill up: 1 MiB there takes 34 ms, as do the echoes behind it."""
    training = Training(ranks, steps, spread)
    training.run()
    training.team.close()
    assert dict(training.team.network.dropped) == {}
    assert training.missing == 0
    half = steps // 2
    step = max((ends[-1] - ends[half - 1]) / (steps - half) for ends in training.ends) / S
    packets = 2 * (ranks - 1) / ranks * ENTRIES / ROW * BUCKETS
    least = packets * (ROW + HEADER_BYTES + HEADERS) * 8 / RATE + (PAUSE + spread / 2) / S
    assert step <= 1.12 * least


# -- marks of a shallow queue slow senders before it drops (clock-24) --------------------------------------------------


def test_marks_of_a_shallow_queue_slow_its_senders() -> None:
    """Rows of the rank that is late meet those of others."""
    switching = Switching(rate=10**8, buffer=64 << 10, mark=16 << 10)
    with contextlib.closing(Team(arrange("flat", 4, 1 << 17), switching, 1)) as team:
        team.late = 4 * MS
        steps = [team.step() for _ in range(4)]
        assert any(node.engine.job.flow.snapshot()["slowed"] for node in team.worlds[0].nodes)
    assert sum(step.marks for step in steps) > 0
    assert not any(step.dropped for step in steps)
