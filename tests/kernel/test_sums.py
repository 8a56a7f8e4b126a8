"""What is in sums, records and results afterwards: ranks, weights, short rows, wrong bits and keys, wrapping numbers.

Rules: auth-1, auth-2, kernel-9, kernel-16, kernel-17.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cases
import nibble_cases
import rule_cases
from bpf_calls import map_lookup
from kernel_world import KernelWorld
from loaders import both_loaders
from reference_proof import check_reference
from tailbound.kernel.maps import put_key
from tailbound.wire.schema import OP_INDEX_BITS, OP_STEPS, Verdict, op_label, op_slot

FF = bytes([255]) * cases.WIDTH


def contribution(sender: int, body: bytes, **fields: int) -> bytes:
    values = {"owner": cases.RANK, "seq": cases.SEQ, "row": 5, "rows": cases.ROWS, "weight": 1} | fields
    return cases.build(1, body, sender=sender, exponent=cases.EXPONENT, **values)  # type: ignore[arg-type]


def test_lanes_hold_65535(make) -> None:
    """256 ranks, and the largest sum that 16 bits hold: 128 ranks of weight 2 and one of weight 1 give 257 x 255.

    Rule: codec-9.
    """
    world = make(ranks=256)
    world.control(weight_cap=2)
    slot = cases.SEQ & (cases.SUM_ROWS - 1)
    for sender in range(1, 129):
        world.take(contribution(sender, FF, weight=2))
    assert world.take(contribution(129, FF))[0] == Verdict.ADDED
    assert (world.lanes(slot, cases.WIDTH) == 65535).all()
    record = world.store.slots[slot]
    assert (record["count"], record["units"]) == (129, 257 * 128)
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
def test_scales_and_short_rows(make) -> None:
    """Rule: codec-9."""
    rule_cases.check_fits(make())


@pytest.mark.parametrize("start", [0xFFFFFF00, 0x7FFFFF00])
def test_serials_wrap(make, start: int) -> None:
    """400 ops and rows across the place where a serial number starts again or changes its sign: no gap, no ghost."""
    world = make()
    world.seal(start - 1 & 0xFFFFFFFF, 0, cases.SUM_ROWS)
    world.control(first_op=start, map_since=start, sum_base=start, result_base=start, released=start - 1 & 0xFFFFFFFF)
    for i in range(400):
        serial = start + i & 0xFFFFFFFF
        marks = {"contributed": serial - 1 & 0xFFFFFFFF, "published": serial - 1 & 0xFFFFFFFF}
        row = contribution(1, bytes([i % 255 + 1]) * 16, op=serial, seq=serial, rows=300, **marks)
        assert world.take(row) == (Verdict.STORED, 1), i
        assert world.take(cases.result(2, 16, op=serial, seq=serial, **marks)) == (Verdict.RESULT_TAKEN, 2), i
        assert world.take(row) == (Verdict.DUPLICATE, 1), i
        if i >= 40:
            world.seal(serial - 40 & 0xFFFFFFFF, serial - 40 & 0xFFFFFFFF, 1)
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
    world.seal(cases.OP, cases.SUM_ROWS - 3, 6)
    verdicts = [world.take(contribution(1, bytes(16), seq=cases.SUM_ROWS - 6 + i))[0] for i in range(12)]
    assert verdicts == [Verdict.STORED] * 3 + [Verdict.LATE] * 6 + [Verdict.STORED] * 3


# -- the check in C is the check of ``wire.check`` (kernel-9) ----------------------------------------------------------


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
        codes = np.frombuffer(payload, np.uint8).astype(np.uint16)
        assert np.array_equal(world.lanes(slot, count), cases.FINER * codes)
        assert not world.store.sums[slot, 2 * count :].any()


# -- rows that tell nothing but their codes: the check is made in the pass that takes the codes in (kernel-9) ----------


SLOT, POSITION = cases.SEQ & (cases.SUM_ROWS - 1), cases.RESULT_SEQ & (cases.RESULT_ROWS - 1)
NEXT = op_label(3, 2)  # in progress together with the op of the cases
OVER = op_label(2, 1)  # over, as all up to RELEASED are


def whole_row(sender: int, length: int = cases.WIDTH, **fields: int) -> bytes:
    return cases.contribution(sender, length, **fields)


def whole_result(sender: int, length: int = cases.WIDTH, **fields: int) -> bytes:
    return cases.result(sender, length, **fields)


def introduce(world: KernelWorld, op: int = cases.OP, length: int = cases.WIDTH, at: int = 1) -> None:
    """Says all that the three senders have to say of an op, with other rows than those that tests look at."""
    for sender in (1, 2, 3):
        assert world.take(whole_row(sender, length, op=op, seq=cases.SEQ + at, row=6))[0] <= Verdict.ADDED
        assert (
            world.take(whole_result(sender, length, op=op, seq=cases.RESULT_SEQ + at + sender))[0]
            == Verdict.RESULT_TAKEN
        )


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
            world.take(whole_row(sender, op=OVER))
            world.take(whole_result(1, op=OVER))
        world.control(**cases.control_values())
    introduce(world, length=length)
    bits = [*range(0, 512, 3), *range(512, 8 * (64 + length), 29), *range(8 * (56 + length), 8 * (64 + length))]
    for data, verdict in (
        (whole_row(1, length), Verdict.STORED),
        (whole_row(2, length), Verdict.ADDED),
        (whole_row(3, length), Verdict.ADDED),
        (whole_result(2, length), Verdict.RESULT_TAKEN),
    ):
        before = books(world)
        for bit in bits:
            said, sender = world.take(cases.flipped(data, bit), data[14])
            assert said >= Verdict.BAD_LENGTH, bit
            assert sender == 256
            assert books(world) == before, bit
        assert world.take(data)[0] == verdict
    codes = [np.frombuffer(whole_row(sender, length)[64:], np.uint8).astype(np.uint16) for sender in (1, 2, 3)]
    assert np.array_equal(world.lanes(SLOT, length), cases.FINER * sum(codes))
    assert world.store.slots[SLOT]["count"] == 3
    assert world.store.results[POSITION][:length].tobytes() == whole_result(2, length)[64:]
    if over:  # what is behind a shorter row stays as it was
        behind = sum(np.frombuffer(whole_row(sender)[64:], np.uint8).astype(np.uint16) for sender in (1, 2, 3))
        assert np.array_equal(world.lanes(SLOT, cases.WIDTH)[length:], cases.FINER * behind[length:])
        assert world.store.results[POSITION][length:].tobytes() == whole_result(1)[64 + length :]


def test_a_wrong_label_spoils_no_row_in_progress(make: Callable[..., KernelWorld]) -> None:
    """A newer label that is in progress too, on a row's own sequence, with a wrong check: the row stays as it is."""
    world = make()
    introduce(world)
    introduce(world, NEXT, at=9)
    world.take(whole_row(1))
    world.take(whole_row(2))
    world.take(whole_result(1))
    before = books(world)
    for data in (whole_row(1, op=NEXT), whole_row(3, op=NEXT), whole_result(1, op=NEXT), whole_result(3, op=NEXT)):
        assert world.take(cases.flipped(data, 8 * 200)) == (Verdict.CORRUPT, 256)
        assert books(world) == before
    for data in (whole_row(1, op=NEXT), whole_row(3, op=NEXT), whole_result(1, op=NEXT), whole_result(3, op=NEXT)):
        assert world.take(data)[0] in (Verdict.FUTURE_OP, Verdict.FUTURE_RESULT)  # right, and at another row's place
        assert books(world) == before


@pytest.mark.needs("bpf", "clang", "libbpf")
def test_a_packet_of_the_job_before_spoils_no_row(take_back: Callable[[list[tuple[str, str, str]]], None]) -> None:
    """Another job begins while a packet is between its cookie's rule and its row's lock: that rule is left out."""
    take_back([("xdp_programs/ingest.h", "	if (tb_be32(f->head->cookie) != control->cookie)", "	if (0)")])
    with contextlib.closing(KernelWorld("clang")) as world:
        introduce(world)
        now = cases.COOKIE + 2
        world.control(cookie=now)
        assert world.take(whole_row(1, op=NEXT, cookie=now))[0] == Verdict.STORED
        assert world.take(whole_result(1, op=NEXT, cookie=now))[0] == Verdict.RESULT_TAKEN
        row = world.store.sums[SLOT].tobytes(), world.store.results[POSITION].tobytes()
        for data in (whole_row(2), whole_result(2)):
            assert world.take(cases.flipped(data, 8 * 200)) == (Verdict.CORRUPT, 256)
            assert (world.store.sums[SLOT].tobytes(), world.store.results[POSITION].tobytes()) == row


# -- results are counted without the record's lock, by an addition that says what it counts (kernel-17) ----------------


_LOOK = "	if (was.tag != tag)\n		return 0;\n"
#: An op whose record would lie where that of the cases lies.
OTHER = cases.OP + (OP_STEPS << OP_INDEX_BITS)


@pytest.mark.needs("bpf", "clang", "libbpf")
def test_what_was_counted_in_another_ops_record_is_taken_back(
    take_back: Callable[[list[tuple[str, str, str]]], None],
) -> None:
    """The record becomes another op's between look and addition: the look is left out."""
    take_back([("ebpf/op.h", _LOOK, "")])
    with contextlib.closing(KernelWorld("clang")) as world:
        assert world.take(cases.result(1))[0] == Verdict.RESULT_TAKEN
        record = world.store.ops[op_slot(OTHER)]
        before = record.tobytes()
        assert (record["op"], record["results_in"]) == (cases.OP, 1)
        assert world.take(cases.result(2, op=OTHER, seq=cases.RESULT_SEQ + 1))[0] == Verdict.RESULT_TAKEN
        assert record.tobytes() == before


# -- packets of a sender who has all but the key (auth-1, auth-2) ------------------------------------------------------


def test_a_key_that_is_over_opens_nothing(make: Callable[..., KernelWorld]) -> None:
    """Two epochs later its place is another key's."""
    world = make()
    world.arm()
    recorded = cases.tagged(cases.contribution(1))
    assert world.take(recorded)[0] == Verdict.STORED
    assert world.take(cases.tagged(cases.contribution(2, seq=cases.SEQ + 1), 1))[0] == Verdict.STORED
    put_key(world.maps.fds["keys"], 2, cases.KEYS[0][::-1].copy())
    assert world.take(cases.tagged(cases.contribution(2))) == (Verdict.FORGED, 256)
    assert world.take(cases.tagged(cases.contribution(2), 1))[0] == Verdict.ADDED


def test_keys_cannot_be_read_back(make: Callable[..., KernelWorld]) -> None:
    world = make()
    world.arm()
    fd = world.maps.fds["keys"]
    with pytest.raises(PermissionError):
        map_lookup(fd, struct.pack("=I", 0), cases.KEYS[0].nbytes)


@pytest.mark.needs("bpf", "clang", "libbpf")
def test_without_the_program_nothing_is_taken() -> None:
    """A job says that it has a key where that program is missing."""
    with contextlib.closing(KernelWorld("clang")) as world:
        for data in (cases.contribution(1), cases.tagged(cases.contribution(1))):
            world.control(tagged=1)
            assert world.take(data) == (Verdict.INACTIVE, 256)
        world.control(tagged=0)
        assert world.take(cases.contribution(1))[0] == Verdict.STORED
