"""The check in C is the check of ``wire.check``: golden packets, every length, and the change by parts (kernel-9)."""

from __future__ import annotations

import numpy as np
import pytest

import cases
from kernel_world import HEADERS
from reference_proof import check_reference
from tailbound.wire.schema import PacketType, Verdict


def test_every_length(make) -> None:
    """Rows of 16 to 1408 codes: the program takes what the plain-integer reference has checked."""
    world = make(width=1408)
    rng = np.random.default_rng(3)
    for i, count in enumerate(range(16, 1409, 16)):
        if i % cases.SUM_ROWS == 0:
            world.begin()
        head = bytearray(cases.contribution(1, count=16, seq=cases.SUM_BASE + i % cases.SUM_ROWS, op=cases.OP + i)[:64])
        payload = rng.integers(0, 256, count, np.uint8).tobytes()
        head[56:] = check_reference(bytes(head), payload).to_bytes(8, "big")
        slot = cases.SUM_BASE + i & cases.SUM_ROWS - 1
        assert world.take(bytes(head) + payload)[0] == Verdict.STORED
        assert np.array_equal(world.lanes(slot, count), np.frombuffer(payload, np.uint8))
        assert not world.store.sums[slot, 2 * count :].any()


@pytest.mark.parametrize("owner", [0, 1, 254])
def test_reflected_check(make, owner: int) -> None:
    """The echo's check is made from the probe's by difference; it equals the one made from nothing."""
    world = make(ranks=255)
    world.control(rank=owner)
    probe = cases.control_packet(PacketType.PROBE, bytes(range(32)), sender=7, owner=owner, lateness=77)
    world.take(probe)
    echo = world.back[HEADERS:]
    assert int.from_bytes(echo[56:64], "big") == check_reference(echo[:64], echo[64:])
