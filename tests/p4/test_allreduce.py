"""Whole all-reduces over the P4 switch: communicators in namespaces, rows summed by bmv2."""

from __future__ import annotations

import numpy as np
import pytest

from p4_team import p4_team
from p4_world import lose
from support import exact_mean, gradients, nmse, patient
from tailbound.switch import report
from tailbound.switch.report import lines

pytestmark = pytest.mark.needs("root", "netns", "p4c", "bmv2", "thrift")

RANKS = 3
NUMEL = 9000


@pytest.mark.parametrize(
    ("datapath", "width"), [("udp", 256), pytest.param("xdp", 1408, marks=pytest.mark.needs("bpf", "bcc", "headers"))]
)
def test_the_mean_of_all(datapath: str, width: int) -> None:
    with p4_team(RANKS, patient(width=width), datapath=datapath) as (job, box):
        for op in range(3):
            inputs = gradients("U", RANKS, NUMEL, seed=op)
            results = job.allreduce(inputs)
            assert all(o.delivered == o.expected and o.error is None and not o.missing for _, o in results)
            first = results[0][0].view(np.uint32)
            assert all(np.array_equal(first, out.view(np.uint32)) for out, _ in results)
            assert nmse(results[0][0], exact_mean(inputs)) <= 3e-3
        assert job[0].datapath == f"switch-{datapath}"
        found = report.examine(box)
        (entry,) = found["jobs"]
        assert entry["slots"]["open"] == 0
        assert (
            {"STORED", "ADDED"} <= set(entry["verdicts"]) <= {"STORED", "ADDED", "REFLECTED", "ANSWERED", "DUPLICATE"}
        )
        assert f"{entry['slots']['final']} final" in "\n".join(lines(found))


def test_a_lossy_switch_loses_no_row() -> None:
    """What is lost on the way in or out is sent again on a gap, and answered from the slot."""
    with p4_team(2, patient(quiet=20_000_000), datapath="udp") as (job, box):
        job.allreduce(gradients("U", 2, NUMEL, seed=0))
        for port in range(2):
            for way in ("in", "out"):
                lose(box.switch, port, way, 0.05, seed=port + 7)
        inputs = gradients("U", 2, NUMEL, seed=1)
        results = job.allreduce(inputs)
        counters = [box.switch.port_counters(port) for port in range(2)]
        assert sum(c["lost_in"] + c["lost_out"] for c in counters) > 0
        assert all(o.delivered == o.expected and o.error is None for _, o in results)
        assert nmse(results[0][0], exact_mean(inputs)) <= 3e-3
