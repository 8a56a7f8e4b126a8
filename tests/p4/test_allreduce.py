"""Whole all-reduces over the P4 switch: communicators in namespaces, rows summed by bmv2."""

from __future__ import annotations

import pytest

from p4_team import p4_team
from support import patient, whole
from tailbound.switch import report
from tailbound.switch.report import lines

pytestmark = pytest.mark.needs("root", "netns", "p4c", "bmv2", "thrift")

RANKS = 3
NUMEL = 9000


@pytest.mark.parametrize(
    ("datapath", "width"),
    [
        ("udp", 256),
        pytest.param("xdp", 1408, marks=[pytest.mark.thorough, pytest.mark.needs("bpf", "bcc", "headers")]),
    ],
)
def test_the_mean_of_all(datapath: str, width: int) -> None:
    with p4_team(RANKS, patient(width=width), datapath=datapath) as (job, box):
        for op in range(3):
            inputs, results = job.averaged(NUMEL, op)
            whole(results, inputs, 3e-3)
        assert job[0].datapath == f"switch-{datapath}"
        found = report.examine(box)
        (entry,) = found["jobs"]
        assert entry["slots"]["open"] == 0
        assert (
            {"STORED", "ADDED"} <= set(entry["verdicts"]) <= {"STORED", "ADDED", "REFLECTED", "ANSWERED", "DUPLICATE"}
        )
        assert f"{entry['slots']['final']} final" in "\n".join(lines(found))
