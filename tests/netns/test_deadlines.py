"""Learned deadlines over XDP: what the kernel's stamps teach, and what a rank that stays away costs then (clock-5)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lab_team import lab_team
from support import MS, gradients
from tailbound.transport.config import FLOOR
from tailbound.transport.deadline import WARM_UP_OPS
from tailbound_lab.lab.cluster import Cluster

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

NUMEL = 2 * 64 * 1408
STAGE_MAX = 20_000 * MS


def test_a_rank_that_stays_away_costs_what_was_learned(tailbound_lab: Callable[..., Cluster]) -> None:
    lab = tailbound_lab(workers=3)
    with lab_team(lab, {"width": 1408, "ring_mib": 8.0, "stage_max": STAGE_MAX}) as job:
        inputs = gradients("U", 3, NUMEL, seed=1)
        for _ in range(WARM_UP_OPS + 14):
            job.allreduce(inputs)
        for communicator in job.communicators:
            deadlines = communicator.job.deadlines
            assert FLOOR <= deadlines.advertised < STAGE_MAX / 4
            assert FLOOR <= deadlines.stage_two(deadlines.largest) < STAGE_MAX / 4
        for op in range(4):
            for _, outcome in job.allreduce(inputs, ranks=[0, 1]):
                assert outcome.nanoseconds < STAGE_MAX / 2
                assert op == 3 or 2 in outcome.missing
        assert all(2 in c.job.membership.contribution.suspects for c in job.communicators[:2])
