"""Repair over XDP between namespaces: rows that the network drops come back, and the ledger says how (clock-23)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lab_team import lab_team
from support import MS, exact_mean, gradients, nmse, patient
from tailbound.wire.schema import Verdict
from tailbound_lab.lab.cluster import Cluster

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

NUMEL = 8 * 64 * 1408


def test_what_the_network_drops_is_repaired_in_warm_up(tailbound_lab: Callable[..., Cluster]) -> None:
    """1 % of all packets lost, requests and answers too: whole ops, equal bits, and the books agree with the kernel."""
    ranks, ops, whole = 3, 6, 0
    lab = tailbound_lab(workers=ranks, loss=0.01)
    with lab_team(lab, patient(width=1408, ring_mib=8.0, quiet=20 * MS)) as job:
        for op in range(ops):
            inputs = gradients("U", ranks, NUMEL, seed=op)
            results = job.allreduce(inputs)
            if all(outcome.delivered == outcome.expected for _, outcome in results):
                whole += 1
                assert nmse(results[0][0], exact_mean(inputs)) <= 1.6e-2
                for out, _ in results:
                    np.testing.assert_array_equal(out.view(np.uint32), results[0][0].view(np.uint32))
        assert whole >= ops - 1  # a row is asked for seven times in warm-up
        members = job.communicators
        repaired = [member.job.counters["rows_repaired"] for member in members]
        assert min(repaired) > 0
        for member in members:
            counters = member.job.counters
            assert int(member.job.repairs.came.sum()) == counters["rows_repaired"] <= counters["repair_rows_asked"]
        sent = sum(member.job.counters["repair_rows_sent"] for member in members)
        total = sum(member.job.records.verdicts().sum(axis=0) for member in members)
        doubles = (
            Verdict.DUPLICATE, Verdict.DUPLICATE_RESULT, Verdict.DUPLICATE_REPAIR, Verdict.DUPLICATE_REPAIR_RESULT,
        )  # fmt: skip
        # nothing is doubled here but by repair; which of two copies comes first is up to the queues they wait in
        assert sum(int(total[verdict]) for verdict in doubles) <= sent
