"""Marks of a shallow queue: they arrive, are counted by sender, come back with echoes, and slow senders (clock-24)."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from lab_team import lab_team
from support import gradients, patient
from tailbound_lab.lab.cluster import Cluster

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

MBIT = 10**6
RANKS, NUMEL = 3, 1 << 19
#: Until two senders have met at a port: patience, and no bound.
OPS = 300


def test_marks_come_back_and_slow_senders(tailbound_lab: Callable[..., Cluster]) -> None:
    """Rule: kernel-26."""
    lab = tailbound_lab(workers=RANKS, rate=100 * MBIT, queue=64 << 10, ecn=True)
    settings = patient(width=1408, ring_mib=8.0, rate=100 * MBIT / 8, dscp=11)
    with lab_team(lab, settings) as job:
        classes = {sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) for one in job for sock in one.job.sender.sockets}
        assert classes == {11 << 2 | 2}  # DSCP, and ECT(0)
        for seed in range(OPS):
            job.allreduce(gradients("U", RANKS, NUMEL, seed=seed))
            seen = [member.job.flow.snapshot() for member in job]
            if all(any(of[name] for of in seen) for name in ("marked", "marked_there", "slowed")):
                break
        else:
            raise AssertionError("no mark has slowed a sender")
        assert lab.fault_counts().marked >= sum(of["marked"] for of in seen) > 0
        assert {of["rtt_by"] for of in seen} == {"kernel"}
