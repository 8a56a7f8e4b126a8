"""Whole rows that tell nothing but their codes: their check is made in the pass that takes the codes in.

What is wrong is found when its codes lie in memory already. Nobody may find them there. Rules: kernel-9, kernel-16,
kernel-17.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import cases
from kernel_world import KernelWorld
from tailbound.wire.schema import Verdict, op_label

SLOT, POSITION = cases.SEQ & (cases.SUM_ROWS - 1), cases.RESULT_SEQ & (cases.RESULT_ROWS - 1)
NEXT = op_label(3, 2)  # in progress together with the op of the cases
OVER = op_label(2, 1)  # over, as all up to RELEASED are


def contribution(sender: int, length: int = cases.WIDTH, **fields: int) -> bytes:
    return cases.contribution(sender, length, **fields)


def result(sender: int, length: int = cases.WIDTH, **fields: int) -> bytes:
    return cases.result(sender, length, **fields)


def introduce(world: KernelWorld, op: int = cases.OP, length: int = cases.WIDTH, at: int = 1) -> None:
    """Says all that the three senders have to say of an op, with other rows than those that tests look at."""
    for sender in (1, 2, 3):
        assert world.take(contribution(sender, length, op=op, seq=cases.SEQ + at, row=6))[0] <= Verdict.ADDED
        assert world.take(result(sender, length, op=op, seq=cases.RESULT_SEQ + at + sender))[0] == Verdict.RESULT_TAKEN


def books(world: KernelWorld) -> dict[str, bytes]:
    """What a host may read: all records, and the codes of rows that are not over."""
    store = world.store
    out = {
        name: getattr(store, name).tobytes() for name in ("slots", "result_records", "presence", "ops", "peer_states")
    }
    for rows, records in (("sums", store.slots), ("results", store.result_records)):
        used = (records["cookie"] == cases.COOKIE) & (records["op"] > store.control["released"][0])
        out[rows] = getattr(store, rows)[used].tobytes()
    return out


@pytest.mark.parametrize("length", [cases.WIDTH, 112])
@pytest.mark.parametrize("over", [False, True], ids=["new memory", "over a row that is over"])
def test_one_wrong_bit(make: Callable[..., KernelWorld], over: bool, length: int) -> None:
    """A wrong bit anywhere, in what would be stored, added and copied; then the same packet without it."""
    world = make()
    if over:
        world.control(released=OVER - 1, map_since=OVER)
        for sender in (1, 2, 3):
            world.take(contribution(sender, op=OVER))
            world.take(result(1, op=OVER))
        world.control(**cases.control_values())
    introduce(world, length=length)
    bits = [*range(0, 512, 3), *range(512, 8 * (64 + length), 29), *range(8 * (56 + length), 8 * (64 + length))]
    for data, verdict in (
        (contribution(1, length), Verdict.STORED),
        (contribution(2, length), Verdict.ADDED),
        (contribution(3, length), Verdict.ADDED),
        (result(2, length), Verdict.RESULT_TAKEN),
    ):
        before = books(world)
        for bit in bits:
            said, sender = world.take(cases.flipped(data, bit), data[14])
            assert said >= Verdict.BAD_LENGTH, bit
            assert sender == 256
            assert books(world) == before, bit
        assert world.take(data)[0] == verdict
    codes = [np.frombuffer(contribution(sender, length)[64:], np.uint8).astype(np.uint16) for sender in (1, 2, 3)]
    assert np.array_equal(world.lanes(SLOT, length), sum(codes))
    assert world.store.slots[SLOT]["count"] == 3
    assert world.store.results[POSITION][:length].tobytes() == result(2, length)[64:]
    if over:  # what is behind a shorter row stays as it was
        behind = sum(np.frombuffer(contribution(sender)[64:], np.uint8).astype(np.uint16) for sender in (1, 2, 3))
        assert np.array_equal(world.lanes(SLOT, cases.WIDTH)[length:], behind[length:])
        assert world.store.results[POSITION][length:].tobytes() == result(1)[64 + length :]


def test_a_wrong_label_spoils_no_row_in_progress(make: Callable[..., KernelWorld]) -> None:
    """A newer label that is in progress too, on a row's own sequence, with a wrong check: the row stays as it is."""
    world = make()
    introduce(world)
    introduce(world, NEXT, at=9)
    world.take(contribution(1))
    world.take(contribution(2))
    world.take(result(1))
    before = books(world)
    for data in (contribution(1, op=NEXT), contribution(3, op=NEXT), result(1, op=NEXT), result(3, op=NEXT)):
        assert world.take(cases.flipped(data, 8 * 200)) == (Verdict.CORRUPT, 256)
        assert books(world) == before
    for data in (contribution(1, op=NEXT), contribution(3, op=NEXT), result(1, op=NEXT), result(3, op=NEXT)):
        assert world.take(data)[0] in (Verdict.FUTURE_OP, Verdict.FUTURE_RESULT)  # right, and at another row's place
        assert books(world) == before


@pytest.mark.needs("bpf", "clang", "libbpf")
def test_a_packet_of_the_job_before_spoils_no_row(take_back: Callable[[list[tuple[str, str, str]]], None]) -> None:
    """Another job begins while a packet is between its cookie's rule and its row's lock: that rule is left out."""
    take_back([("xdp_programs/ingest.h", "	if (tb_be32(f->head->cookie) != control->cookie)", "	if (0)")])
    world = KernelWorld("clang")
    try:
        introduce(world)
        now = cases.COOKIE + 2
        world.control(cookie=now)
        assert world.take(contribution(1, op=NEXT, cookie=now))[0] == Verdict.STORED
        assert world.take(result(1, op=NEXT, cookie=now))[0] == Verdict.RESULT_TAKEN
        row = world.store.sums[SLOT].tobytes(), world.store.results[POSITION].tobytes()
        for data in (contribution(2), result(2)):
            assert world.take(cases.flipped(data, 8 * 200)) == (Verdict.CORRUPT, 256)
            assert (world.store.sums[SLOT].tobytes(), world.store.results[POSITION].tobytes()) == row
    finally:
        world.close()
