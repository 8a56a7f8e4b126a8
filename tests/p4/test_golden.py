"""Golden packets through the P4 parser and deparser, and its check against theirs."""

from __future__ import annotations

import pytest

import p4_world
import switch_cases
from golden import golden_packets

pytestmark = pytest.mark.needs("root", "netns", "p4c", "bmv2", "thrift")

GOLDEN = golden_packets()


def test_golden_packets_between_others_pass_bit_by_bit(world: p4_world.World) -> None:
    """All fields are parsed and written again on their way to another worker."""
    for golden in GOLDEN:
        step = switch_cases.Step(golden.data, None, source=switch_cases.ip_of(0), destination=switch_cases.ip_of(2))
        p4_world.play(world, [switch_cases.JOB], step)
