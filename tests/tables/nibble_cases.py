"""Contributions in codes of 4 bits, for both datapaths: sums of half bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

import cases
import reference
from reference_worker import spare_of
from tailbound.wire.schema import Flag, PacketType, Verdict

SLOT = cases.SEQ & (cases.SUM_ROWS - 1)
#: Bytes of codes, up to half of the width: short rows, and whole rounds of 32.
COUNTS = [16, 32, 48, 112, 128]


def nibbles(sender: int, body: bytes, **fields: Any) -> bytes:
    """A contribution of two codes a byte."""
    values = {"owner": cases.RANK, "seq": cases.SEQ, "row": 5, "rows": cases.ROWS, "exponent": cases.EXPONENT}
    values |= {"weight": 4} | fields
    return cases.build(PacketType.CONTRIBUTION, body, sender=sender, flags=Flag.HALVES, **values)


def check_sums(world: Any, count: int) -> None:
    """Three ranks, over what an older op with codes of a byte left there; nothing behind the row changes."""
    world.take(cases.contribution(3, cases.WIDTH, op=cases.OP - 1))
    size = 4 * count
    before = world.store.sums[SLOT].copy()
    payloads = np.random.default_rng(count).integers(0, 256, (3, count), np.uint8)
    for sender, payload in enumerate(payloads):
        verdict, _ = world.take(nibbles(sender + 1, payload.tobytes()))
        assert verdict == (Verdict.ADDED if sender else Verdict.STORED)
        assert world.take(nibbles(sender + 1, payload.tobytes()))[0] == Verdict.DUPLICATE
    spare = int(world.store.control["spare"][0])
    want = reference.to_lanes(reference.unpack(payloads, 4).sum(0) * 4 << spare)
    assert np.array_equal(world.store.sums[SLOT, :size].view("<u2"), want)
    assert np.array_equal(world.store.sums[SLOT, size:], before[size:])
    record = world.store.slots[SLOT]
    assert (record["count"], record["units"]) == (3, 3 * 128 * 4 << spare)


def check_more(world: Any) -> None:
    """More ranks than lanes of 8 bits would hold."""
    for sender in range(1, 31):
        world.take(nibbles(sender, bytes([0xFF]) * (cases.WIDTH // 2), weight=1))
    spare = spare_of(1, *(int(world.store.control[name][0]) for name in ("weight_cap", "spare")))
    assert (world.store.sums[SLOT].view("<u2") == 30 * 15 << spare).all()
    assert world.store.slots[SLOT]["count"] == 30
