"""Owner maps that change while the kernel sums: no row is lost to a change; rows of another map: ``tables/cases.py``.

Rules: clock-22, kernel-11.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from lab_team import lab_team
from support import PATIENCE, Team, exact_mean, gradients, nmse, patient
from tailbound.codec.owners import table
from tailbound.collective.communicator import Communicator
from tailbound.collective.op import Outcome
from tailbound.transport.agreement import Content
from tailbound.wire.schema import Verdict
from tailbound_lab.lab.cluster import Cluster

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

RANKS, WIDTH = 3, 1408
NUMEL = 64 * WIDTH
BUCKETS = 3
Make = Callable[..., Cluster]


def settle(job: Team, content: Content) -> None:
    """Has rank 0 propose ``content`` and waits until it is settled."""
    engine, end = job[0]._engine, time.monotonic() + PATIENCE
    agreement = engine.maps.agreement

    def propose() -> bool:
        return agreement.propose(content, job[0].job.sequence.upcoming >> 10, job[0].job.now())

    while not engine.call(propose).result(10):
        assert time.monotonic() < end
        time.sleep(0.01)
    while agreement.agreed[-1].content != content:
        assert time.monotonic() < end
        time.sleep(0.001)


def steps(job: Team, seed: int, count: int) -> None:
    """Steps of several buckets in flight together, on each rank as fast as it can go; nothing is missing."""
    inputs = [gradients("U", RANKS, NUMEL, seed=100 * seed + b) for b in range(BUCKETS)]
    exact = [exact_mean(each) for each in inputs]

    def run(c: Communicator) -> list[tuple[Outcome, float]]:
        found = []
        for _ in range(count):
            outs = [np.full(NUMEL, np.nan, np.float32) for _ in inputs]
            ends: list[Future[Outcome]] = [Future() for _ in inputs]
            for b, (each, out) in enumerate(zip(inputs, outs, strict=True)):
                c.launch(b, each[c.config.rank], out, last=b == BUCKETS - 1, done=ends[b].set_result)
            for b, end in enumerate(ends):
                found.append((end.result(PATIENCE), nmse(outs[b], exact[b])))
        return found

    for outcome, error in (end for ends in job.each(run) for end in ends):
        assert (outcome.error, outcome.late, outcome.delivered) == (None, False, outcome.expected)
        assert error < 2e-3


def until(what: str) -> Callable[[], None]:
    """Fails when it is called too late for ``what``."""
    end = time.monotonic() + PATIENCE

    def check() -> None:
        assert time.monotonic() < end, f"never happened: {what}"

    return check


def test_maps_change_between_steps_and_no_row_is_lost(tailbound_lab: Make) -> None:
    settings: dict[str, Any] = patient(width=WIDTH, ring_mib=8.0, share_rows=False)
    with lab_team(tailbound_lab(workers=RANKS), settings) as job:
        steps(job, 0, 4)
        for i, weights in enumerate([(1, 0, 1), (4, 2, 1)]):
            settle(job, Content(weights))
            in_time = until("all ranks have the new map")
            while any(c.job.sequence.map.owners != table(weights) for c in job.communicators):
                in_time()
                steps(job, 1 + i, 6)
            steps(job, 1 + i, 6)
            assert {c.job.sequence.map.owners for c in job.communicators} == {table(weights)}
        assert [int(c.job.records.verdicts()[:, Verdict.WRONG_MAP].sum()) for c in job.communicators] == [0, 0, 0]
