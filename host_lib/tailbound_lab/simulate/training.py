"""Ranks that train: every step has several buckets, and whoever has all averages of one begins the next by itself.

``steps`` has one bucket a step, which all ranks launch together. Here ops follow each other without a pause, results of
one go beside contributions of the next, and ranks drift apart.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tailbound.wire.schema import HEADER_BYTES
from tailbound_lab.simulate.engine import Done
from tailbound_lab.simulate.fabric import MS, S
from tailbound_lab.simulate.layouts import arrange
from tailbound_lab.simulate.ports import HEADERS, Switching
from tailbound_lab.simulate.steps import WIDTH, Team

#: A training that takes longer never ends, ns.
_NEVER = 600 * S


class Trained(NamedTuple):
    """What became of a training.

    Attributes:
        step: seconds of a step of the slowest rank, the mean of the second half.
        least: seconds that the links need for its packets, and computing.
        dropped: packets, by where.
        missing: rows that did not come, and how many were expected.
    """

    step: float
    least: float
    dropped: dict[str, int]
    missing: tuple[int, int]


def train(
    ranks: int,
    entries: int,
    buckets: int,
    steps: int,
    switching: Switching,
    *,
    compute: int = 3 * MS,
    spread: int = 2 * MS,
    seed: int = 1,
    **settings: Any,
) -> Trained:
    """Trains until all ranks have had ``steps`` steps.

    Args:
        ranks: how many.
        entries: of a bucket.
        buckets: of a step, all launched at its beginning: computing has been done before.
        steps: at least 2.
        switching: of the network.
        compute, spread: ns between two steps of a rank; between these, at random.
        seed: of everything.
        settings: of ``transport.config.Config``.
    """
    team = Team(arrange("flat", ranks, entries), switching, seed, **settings)
    try:
        training = _Training(team, entries, buckets, steps, compute, spread, seed)
        training.run()
    finally:
        team.close()
    packets = 2 * (ranks - 1) / ranks * entries / WIDTH * buckets
    wire = packets * (WIDTH + HEADER_BYTES + HEADERS) * 8 / switching.rate
    return Trained(training.step, wire + (compute + spread / 2) / S, dict(team.network.dropped), training.missing)


class _Training:
    """See ``train``."""

    def __init__(
        self, team: Team, entries: int, buckets: int, steps: int, compute: int, spread: int, seed: int
    ) -> None:
        self._team, self._buckets, self._steps = team, buckets, steps
        self._compute, self._spread, self._random = compute, spread, random.Random(seed)
        self._parts = [parts[0] for parts in team.arrangement.parts]
        self._outs = [[np.zeros(entries, np.float32) for _ in range(buckets)] for _ in self._parts]
        self._ends: list[list[int]] = [[] for _ in self._parts]
        self._expected = self._delivered = 0

    @property
    def step(self) -> float:
        half = self._steps // 2
        return max((ends[-1] - ends[half - 1]) / (self._steps - half) for ends in self._ends) / S

    @property
    def missing(self) -> tuple[int, int]:
        return self._expected - self._delivered, self._expected

    def run(self) -> None:
        network = self._team.network
        for rank in range(len(self._parts)):
            network.at(network.now + self._pause(), partial(self._begin, rank))
        network.run(lambda: all(len(ends) == self._steps for ends in self._ends), _NEVER)
        for world in self._team.worlds:
            if world.error is not None:
                raise world.error
        assert all(len(ends) == self._steps for ends in self._ends), "a step never ends"

    def _pause(self) -> int:
        return self._compute + self._random.randrange(self._spread + 1)

    def _begin(self, rank: int) -> None:
        network, left = self._team.network, set(range(self._buckets))

        def over(bucket: int, one: Done) -> None:
            self._expected += one.outcome.expected
            self._delivered += one.outcome.delivered
            left.discard(bucket)
            if left:
                return
            self._ends[rank].append(network.clock)
            if len(self._ends[rank]) < self._steps:
                network.at(network.clock + self._pause(), partial(self._begin, rank))

        for bucket, out in enumerate(self._outs[rank]):
            self._team.node(self._parts[rank]).submit(
                bucket, self._team.data(rank, 0), out, partial(over, bucket), last=bucket == self._buckets - 1
            )
