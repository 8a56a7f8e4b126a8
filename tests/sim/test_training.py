"""Ranks that train: buckets that follow each other without a pause take what the links need, and not twice that."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

from tailbound.wire.schema import HEADER_BYTES
from tailbound_lab.lab.build import RateLimit
from tailbound_lab.simulate.engine import Done
from tailbound_lab.simulate.fabric import MS, S
from tailbound_lab.simulate.layouts import arrange
from tailbound_lab.simulate.ports import HEADERS, Switching
from tailbound_lab.simulate.steps import WIDTH, Team

RATE, ENTRIES, BUCKETS, COMPUTE = 250 * 10**6, 1_500_000, 4, 3 * MS


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
        pause = COMPUTE + self._random.randrange(self._spread + 1)
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
    packets = 2 * (ranks - 1) / ranks * ENTRIES / WIDTH * BUCKETS
    least = packets * (WIDTH + HEADER_BYTES + HEADERS) * 8 / RATE + (COMPUTE + spread / 2) / S
    assert step <= 1.12 * least
