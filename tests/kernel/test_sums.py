"""What is in the sums afterwards: many ranks, shifts, short rows, half bytes, serial numbers that wrap.

Rules that take several packets to see, and codes of 4 bits: ``unit/test_udp_cases.py`` has the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cases
import nibble_cases
import rule_cases
from kernel_world import KernelWorld
from loaders import both_loaders
from tailbound.wire.schema import EXPONENT_NONE, Verdict

FF = bytes([255]) * cases.WIDTH


def contribution(sender: int, body: bytes, **fields: int) -> bytes:
    values = {"owner": cases.RANK, "seq": cases.SEQ, "row": 5, "rows": cases.ROWS} | fields
    return cases.build(1, body, sender=sender, exponent=cases.EXPONENT, **values)  # type: ignore[arg-type]


def test_lanes_hold_65535(make) -> None:
    """256 ranks, and the largest sum that 16 bits hold: 128 ranks at shift 1 and one at shift 0 give 257 x 255.

    Rule: codec-9.
    """
    world = make(ranks=256)
    slot = cases.SEQ & (cases.SUM_ROWS - 1)
    for sender in range(1, 129):
        world.take(contribution(sender, FF, shift=1, need=sender - 200))
    assert world.take(contribution(129, FF, need=-300))[0] == Verdict.ADDED
    assert (world.lanes(slot, cases.WIDTH) == 65535).all()
    record = world.store.slots[slot]
    assert (record["count"], record["units"], record["need"]) == (129, 257, 128 - 200)
    assert record["exponent"] == cases.EXPONENT
    assert record["row"] == 5


@pytest.mark.parametrize("check", rule_cases.CHECKS)
def test_rules(make, check: Callable[[Any], None]) -> None:
    check(make())


@both_loaders
def test_half_bytes(make) -> None:
    world = make()
    for count in nibble_cases.COUNTS:
        world.begin()
        nibble_cases.check_sums(world, count)
    world.begin(32)
    nibble_cases.check_more(world)


@both_loaders
def test_shifted_and_short(make) -> None:
    """The first is stored with its shift, the others added with theirs; nothing beyond the packet's codes changes.

    Whole rounds of the loop, rests, and both. Rule: codec-9.
    """
    world = make()
    for shifts in ((0, 0, 0), (0, 3, 6), (6, 6, 6), (2, 0, 1)):
        for count in (16, 48, 64, 112, 128, 176, 256):
            world.begin()
            check_shifted(world, shifts, count)


def check_shifted(world: KernelWorld, shifts: tuple[int, int, int], count: int) -> None:
    slot = cases.SEQ & (cases.SUM_ROWS - 1)
    world.take(contribution(3, FF, op=cases.OP - 1))  # what an older op left there
    rng = np.random.default_rng(count)
    codes = rng.integers(0, 256, (3, count), np.uint8)
    for sender, shift in enumerate(shifts):
        verdict, _ = world.take(contribution(sender + 1, codes[sender].tobytes(), shift=shift, need=EXPONENT_NONE))
        assert verdict == (Verdict.ADDED if sender else Verdict.STORED)
    want = (codes.astype(np.uint16) << np.array(shifts, np.uint16)[:, None]).sum(0, dtype=np.uint16)
    assert np.array_equal(world.lanes(slot, count), want)
    assert (world.lanes(slot, cases.WIDTH)[count:] == 255).all()
    record = world.store.slots[slot]
    assert (record["units"], record["need"]) == (sum(1 << s for s in shifts), EXPONENT_NONE)


@pytest.mark.parametrize("start", [0xFFFFFF00, 0x7FFFFF00])
def test_serials_wrap(make, start: int) -> None:
    """400 ops and rows across the place where a serial number starts again or changes its sign: no gap, no ghost."""
    world = make()
    world.sealer.seal(start - 1 & 0xFFFFFFFF, 0, cases.SUM_ROWS)
    world.control(first_op=start, map_since=start, sum_base=start, result_base=start, released=start - 1 & 0xFFFFFFFF)
    for i in range(400):
        serial = start + i & 0xFFFFFFFF
        marks = {"contributed": serial - 1 & 0xFFFFFFFF, "published": serial - 1 & 0xFFFFFFFF}
        row = contribution(1, bytes([i % 255 + 1]) * 16, op=serial, seq=serial, rows=300, **marks)
        assert world.take(row) == (Verdict.STORED, 1), i
        assert world.take(cases.result(2, 16, op=serial, seq=serial, **marks)) == (Verdict.RESULT_TAKEN, 2), i
        assert world.take(row) == (Verdict.DUPLICATE, 1), i
        if i >= 40:
            world.sealer.seal(serial - 40 & 0xFFFFFFFF, serial - 40 & 0xFFFFFFFF, 1)
            late = contribution(2, bytes(16), op=serial - 40 & 0xFFFFFFFF, seq=serial - 40 & 0xFFFFFFFF)
            assert world.take(late) == (Verdict.LATE, 2), i
            base = serial - 45 & 0xFFFFFFFF
            world.control(sum_base=base, result_base=base, released=base - 1 & 0xFFFFFFFF)
    newest = start + 399 & 0xFFFFFFFF
    assert world.store.peer_states[1]["newest"] == newest
    assert world.store.presence[newest & (cases.RESULT_ROWS - 1)]["op"] == newest
    assert set(world.counted()) == {Verdict.STORED, Verdict.RESULT_TAKEN, Verdict.DUPLICATE, Verdict.LATE}


def test_seal_wraps_with_the_ring(make) -> None:
    """Sealing across the end of the ring seals those slots and no others."""
    world = make()
    world.control(sum_base=cases.SUM_ROWS - 6)
    world.sealer.seal(cases.OP, cases.SUM_ROWS - 3, 6)
    verdicts = [world.take(contribution(1, bytes(16), seq=cases.SUM_ROWS - 6 + i))[0] for i in range(12)]
    assert verdicts == [Verdict.STORED] * 3 + [Verdict.LATE] * 6 + [Verdict.STORED] * 3
