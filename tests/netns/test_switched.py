"""All-reduces through the lab's summing switch, over xdp and udp workers: bits, and what leaves each port."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lab_team import lab_team
from support import Team, exact_mean, gradients, nmse, patient, whole
from tailbound.transport.switch import parse
from tailbound_lab.lab.cluster import Cluster

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

Make = Callable[..., Cluster]
NUMEL = 2 * 64 * 1408


def through(lab: Cluster, settings: dict[str, Any], **options: Any) -> Any:
    """A job whose rows go to the lab's switch."""
    where = parse(lab.switch.environment["TAILBOUND_SWITCH"])
    return lab_team(lab, settings | {"switch": where}, cookie=lab.switch.entry.cookie, **options)


def steady(job: Team, ops: int, numel: int = NUMEL) -> list[Any]:
    """All-reduces in which nothing may be missing; results of each, those of rank 0."""
    outs = []
    for op in range(ops):
        inputs, results = job.averaged(numel, op)
        whole(results, inputs, 5e-3)
        assert not any(outcome.late for _, outcome in results)
        outs.append(results[0][0])
    return outs


def test_the_mean_and_its_bits_over_both_datapaths(tailbound_lab: Make) -> None:
    lab, found = tailbound_lab(workers=3, switch=True), list[list[Any]]()
    for datapath in ("xdp", "udp"):
        lab.switch.restart()
        with through(lab, patient(width=1408, ring_mib=8.0), datapath=datapath) as job:
            assert {member.datapath for member in job.communicators} == {f"switch-{datapath}"}
            found.append(steady(job, 3))
            larger = [10 * x for x in gradients("U", 3, NUMEL, seed=1)]
            assert all(outcome.clipped > 0 for _, outcome in job.allreduce(larger))  # beyond the headroom of its scales
            results = job.allreduce(larger)
            assert all(outcome.clipped == 0 for _, outcome in results)
            assert nmse(results[0][0], exact_mean(larger)) <= 5e-3
            ports = {port["name"]: port for port in lab.switch.status()["ports"]}
            copies = [ports[f"data{rank}"]["results"] for rank in range(3)]
            assert min(copies) >= job[0].stats()["counters"]["ops"] * NUMEL // 1408  # of each row, at each port
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
