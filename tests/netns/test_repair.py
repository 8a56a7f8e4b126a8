"""Repair over XDP between namespaces: rows that the network drops come back, and the ledger says how (clock-23)."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from lab_team import lab_team
from support import MS, exact_mean, gradients, nmse, patient
from tailbound.collective.repair import SHARE
from tailbound.kernel.net import speed_of
from tailbound.wire.schema import HEADER_BYTES, Verdict
from tailbound_lab.lab.cluster import Cluster

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

NUMEL = 8 * 64 * 1408


def test_what_the_network_drops_is_repaired_in_warm_up(tailbound_lab: Callable[..., Cluster]) -> None:
    """1 % of all packets lost, requests and answers too: whole ops, equal bits, and the books agree with the kernel."""
    ranks, ops, whole = 3, 12, 0
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


def test_answers_take_their_share_of_the_link(tailbound_lab: Callable[..., Cluster]) -> None:
    """Links of 1 Gbit/s that lose a fifth; veth ends call themselves ten times as fast."""
    lab = tailbound_lab(workers=3, rate=10**9, loss=0.2)
    assert lab.run(0, speed_of, lab.workers[0].address) == 1.25e9
    with lab_team(lab, patient(width=1408, ring_mib=32.0, quiet=20 * MS, result="peers")) as job:
        inputs = gradients("U", 3, 4 * NUMEL, seed=99)
        for _ in range(8):  # a rank that waits for a processor has to fill its socket to see how fast the link is
            job.allreduce([np.tile(each, 2) for each in inputs])
            if all(member.stats()["traffic"]["pace"] <= 1.1 * 1.25e8 for member in job.communicators):
                break
        before = [member.job.counters["repair_rows_sent"] for member in job.communicators]
        begin = time.monotonic()
        for _ in range(2):
            job.allreduce(inputs)
        elapsed = time.monotonic() - begin
        for member, earlier in zip(job.communicators, before, strict=True):
            assert member.stats()["traffic"]["pace"] <= 1.1 * 1.25e8
            answers = (member.job.counters["repair_rows_sent"] - earlier) * (1408 + HEADER_BYTES)
            assert 0 < answers <= SHARE * 1.1 * 1.25e8 * elapsed + (256 << 10)
