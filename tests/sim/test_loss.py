"""Packets lost, in virtual time: what that costs in accuracy, and what is asked for again, to the row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.team import SimTeam, sim_team
from support import Trouble, exact_mean, gradients, nmse, patient
from tailbound.wire.schema import PacketType
from tailbound_lab.simulate.fabric import MS

WIDTH = 64
NUMEL = 8 * 64 * WIDTH
LOSING = patient(width=WIDTH, ring_mib=1.0, quiet=20 * MS, repair=False)


def warm_up(job: SimTeam, ops: int = 3) -> None:
    for op in range(ops):
        for _, outcome in job.allreduce(gradients("U", len(job), NUMEL, seed=1000 + op)):
            assert outcome.delivered == outcome.expected


@pytest.mark.parametrize(
    ("kind", "types", "most"),
    [
        ("U", {PacketType.CONTRIBUTION}, 2e-2),
        ("C", {PacketType.CONTRIBUTION}, 5e-3),
        ("I", {PacketType.CONTRIBUTION}, 5e-4),
        ("U", {PacketType.RESULT}, 1.6e-2),
    ],
)
def test_one_percent_lost_is_within_the_table(kind: str, types: set[PacketType], most: float) -> None:
    """Rule: codec-17."""
    with sim_team(4, LOSING) as job:
        warm_up(job, 1)
        troubles = job.trouble(lambda: Trouble(seed=1, loss=0.01, types=frozenset(types)))
        errors = []
        for op in range(20):
            inputs = gradients(kind, 4, NUMEL, seed=op)
            errors.append(np.mean([nmse(out, exact_mean(inputs)) for out, _ in job.allreduce(inputs)]))
        assert all(trouble.dropped for trouble in troubles)
    assert np.mean(errors) <= most


def test_lost_tails_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every packet with a finished mark of results is lost: ops end by an answer, long before the deadline.

    Rule: clock-30.
    """
    with sim_team(3, LOSING | {"quiet": 5 * MS}) as job:
        warm_up(job)
        for member in job.communicators:
            _drop_result_tails(member, monkeypatch)
        for op in range(3):
            for _, outcome in job.allreduce(gradients("U", 3, NUMEL, seed=op)):
                assert outcome.nanoseconds < 200 * MS  # D1 + D2 are 20 s
                assert outcome.deadline_hits == 0
                assert outcome.missed == 2  # one of each owner
        assert sum(member.stats()["counters"].get("asked", 0) for member in job.communicators) > 0
        assert all("STALE_RESULT" not in member.stats()["drops"] for member in job.communicators)


def _drop_result_tails(member: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the last packet out of every run of results."""
    queue = member.job.flow.queue
    submit = queue.submit

    def shortened(label: int, kind: PacketType, runs: Any, *rest: Any) -> None:
        submit(label, kind, [(r, p[:-1] if kind == PacketType.RESULT else p) for r, p in runs], *rest)

    monkeypatch.setattr(queue, "submit", shortened)
