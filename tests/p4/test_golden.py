"""Golden packets through the P4 parser and deparser, and its check against theirs."""

from __future__ import annotations

import numpy as np
import pytest

import p4_world
import switch_cases
from golden import Golden, golden_packets
from tailbound.wire.schema import Verdict

pytestmark = pytest.mark.needs("root", "netns", "p4c", "bmv2", "thrift")

GOLDEN = golden_packets()


def test_golden_packets_between_others_pass_bit_by_bit(world: p4_world.World) -> None:
    """All fields are parsed and written again on their way to another worker."""
    for golden in GOLDEN:
        step = switch_cases.Step(golden.data, None, source=switch_cases.ip_of(0), destination=switch_cases.ip_of(2))
        p4_world.play(world, [switch_cases.JOB], step)


@pytest.mark.parametrize(
    "golden", [g for g in GOLDEN if len(g.payload) <= 512 and g.fields["sender"] < 8], ids=lambda g: g.name
)
def test_golden_checks(world: p4_world.World, golden: Golden) -> None:
    """The switch finds a packet whole, whatever it thinks of it otherwise, and damaged when a bit of it is turned."""
    sender = int(golden.fields["sender"])
    damaged = golden.data[:-1] + bytes([golden.data[-1] ^ 1])
    found = []
    ports = [rank % p4_world.PORTS for rank in range(8)]
    with world.jobs([switch_cases.Job(cookie=int(golden.fields["cookie"]), ranks=8)], ports):
        for data in (golden.data, damaged):
            step = switch_cases.Step(data, None, source=switch_cases.ip_of(sender))
            world.feed(sender % p4_world.PORTS, p4_world.frame_of(step, sender % p4_world.PORTS))
            ledger = world.switch.ledger(0)
            found.append([(int(row), Verdict(column)) for row, column in np.argwhere(ledger)])
            p4_world.zero_counters(world.switch)
    (whole,), (broken,) = found
    assert whole[0] == sender
    assert whole[1] is not Verdict.CORRUPT
    assert broken == (p4_world.SIZES.ranks, Verdict.CORRUPT)
