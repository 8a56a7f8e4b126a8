"""What is in sums, records and results afterwards: ranks, weights, lengths, keys, wrapping numbers.

Rules: auth-1, auth-2, kernel-9, kernel-16, kernel-17.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable

import numpy as np
import pytest

import cases
import rule_cases
from bpf_calls import map_lookup
from kernel_world import KernelWorld
from loaders import both_loaders
from reference_proof import check_reference
from tailbound.wire.schema import OP_INDEX_BITS, OP_STEPS, PacketType, Verdict, op_label, op_slot

SLOT, POSITION = cases.SEQ & (cases.SUM_ROWS - 1), cases.RESULT_SEQ & (cases.RESULT_ROWS - 1)
Change = Callable[[list[tuple[str, str, str]]], None]


@both_loaders
def test_scales_and_short_rows(make) -> None:
    """Rule: codec-9."""
    rule_cases.check_fits(make())


def test_lanes_hold_65535(make) -> None:
    """The largest sum that 16 bits hold: 128 ranks of weight 2 and one of weight 1 give 257 x 255. Rule: codec-9."""
    world = make(ranks=256)
    world.control(weight_cap=2)
    fields = {"owner": cases.RANK, "seq": cases.SEQ, "rows": 1, "exponent": cases.EXPONENT}
    for sender in range(1, 130):
        full = cases.build(
            PacketType.CONTRIBUTION, bytes([255]) * cases.WIDTH, sender=sender, weight=2 - (sender == 129), **fields
        )
        assert world.take(full)[0] <= Verdict.ADDED
    assert (world.lanes(SLOT, cases.WIDTH) == 65535).all()
    record = world.store.slots[SLOT]
    assert (record["count"], record["units"], record["exponent"]) == (129, 257 * 128, cases.EXPONENT)


@pytest.mark.parametrize("start", [0xFFFFFF00, 0x7FFFFF00])
def test_serials_wrap(make, start: int) -> None:
    """400 ops and rows across the place where a serial number starts again or changes its sign: no gap, no ghost."""
    world = make()

    def at(i: int) -> int:
        return start + i & 0xFFFFFFFF

    world.seal(at(-1), 0, cases.SUM_ROWS)
    world.control(first_op=start, map_since=start, sum_base=start, result_base=start, released=at(-1))
    for i in range(400):
        fields = {"op": at(i), "seq": at(i), "contributed": at(i - 1), "published": at(i - 1), "rows": 300}
        assert world.take(cases.contribution(1, 16, **fields)) == (Verdict.STORED, 1), i
        assert world.take(cases.result(2, 16, **fields)) == (Verdict.RESULT_TAKEN, 2), i
        assert world.take(cases.contribution(1, 16, **fields)) == (Verdict.DUPLICATE, 1), i
        if i >= 40:
            world.seal(at(i - 40), at(i - 40), 1)
            late = cases.contribution(2, 16, op=at(i - 40), seq=at(i - 40))
            assert world.take(late) == (Verdict.LATE, 2), i
            world.control(sum_base=at(i - 45), result_base=at(i - 45), released=at(i - 46))
    assert world.store.peer_states[1]["newest"] == at(399)
    assert world.store.presence[at(399) & (cases.RESULT_ROWS - 1)]["op"] == at(399)


def test_seal_wraps_with_the_ring(make) -> None:
    """Sealing across the end of the ring seals those slots and no others."""
    world, base = make(), cases.SUM_ROWS - 6
    world.control(sum_base=base)
    world.seal(cases.OP, base + 3, 6)
    verdicts = [world.take(cases.contribution(1, 16, seq=base + i))[0] for i in range(12)]
    assert verdicts == [Verdict.STORED] * 3 + [Verdict.LATE] * 6 + [Verdict.STORED] * 3


def test_every_length(make) -> None:
    """Rows of 16 to 1408 codes: the program takes what the plain-integer reference has checked (kernel-9)."""
    world = make(width=1408)
    for i, count in enumerate(range(16, 1409, 16)):
        if i % cases.SUM_ROWS == 0:
            world.begin()
        seq = cases.SUM_BASE + i % cases.SUM_ROWS
        data = bytearray(cases.contribution(1, count, seq=seq, op=cases.OP + i))
        data[56:64] = check_reference(data[:64], data[64:]).to_bytes(8, "big")
        assert world.take(bytes(data))[0] == Verdict.STORED
        codes = np.frombuffer(data[64:], np.uint8).astype(np.uint16)
        assert np.array_equal(world.lanes(seq & cases.SUM_ROWS - 1, count), cases.FINER * codes)
        assert not world.store.sums[seq & cases.SUM_ROWS - 1, 2 * count :].any()


# -- what only two CPUs could show, with a rule left out of the program ------------------------------------------------


@pytest.mark.needs("bpf", "clang", "libbpf")
def test_a_packet_of_the_job_before_spoils_no_row(take_back: Change) -> None:
    """Another job begins while a packet is between its cookie's rule and its row's lock (kernel-9)."""
    take_back([("xdp_programs/ingest.h", "	if (tb_be32(f->head->cookie) != control->cookie)", "	if (0)")])
    with contextlib.closing(KernelWorld("clang")) as world:
        for made in (cases.contribution, cases.result):  # of the job before: what follows has nothing new to say
            base = cases.SEQ if made is cases.contribution else cases.RESULT_SEQ
            assert world.take(made(2, cases.WIDTH, seq=base + 1, row=6))[0] < Verdict.BAD_LENGTH
        now = {"op": op_label(3, 2), "cookie": cases.COOKIE + 2}
        world.control(cookie=now["cookie"])
        assert world.take(cases.contribution(1, cases.WIDTH, **now))[0] == Verdict.STORED
        assert world.take(cases.result(1, cases.WIDTH, **now))[0] == Verdict.RESULT_TAKEN
        row = world.store.sums[SLOT].tobytes(), world.store.results[POSITION].tobytes()
        for data in (cases.contribution(2, cases.WIDTH), cases.result(2, cases.WIDTH)):
            assert world.take(cases.flipped(data, 8 * 200)) == (Verdict.CORRUPT, 256)
            assert (world.store.sums[SLOT].tobytes(), world.store.results[POSITION].tobytes()) == row


@pytest.mark.needs("bpf", "clang", "libbpf")
def test_what_was_counted_in_another_ops_record_is_taken_back(take_back: Change) -> None:
    """A record becomes another op's between look and addition (kernel-17)."""
    take_back([("ebpf/op.h", "	if (was.tag != tag)\n		return 0;\n", "")])
    other = cases.OP + (OP_STEPS << OP_INDEX_BITS)
    with contextlib.closing(KernelWorld("clang")) as world:
        assert world.take(cases.result(1))[0] == Verdict.RESULT_TAKEN
        record = world.store.ops[op_slot(other)]
        before = record.tobytes()
        assert (record["op"], record["results_in"]) == (cases.OP, 1)
        assert world.take(cases.result(2, op=other, seq=cases.RESULT_SEQ + 1))[0] == Verdict.RESULT_TAKEN
        assert record.tobytes() == before


# -- keys (auth-1, auth-2) ---------------------------------------------------------------------------------------------


def test_a_key_that_is_over_opens_nothing(make) -> None:
    """Two epochs later its place is another key's; the kernel gives none of them back."""
    world = make()
    world.arm()
    assert world.take(cases.tagged(cases.contribution(1)))[0] == Verdict.STORED
    assert world.take(cases.tagged(cases.contribution(2, seq=cases.SEQ + 1), 1))[0] == Verdict.STORED
    world.put_key(2, cases.KEYS[0][::-1].copy())
    assert world.take(cases.tagged(cases.contribution(2))) == (Verdict.FORGED, 256)
    assert world.take(cases.tagged(cases.contribution(2), 1))[0] == Verdict.ADDED
    with pytest.raises(PermissionError):
        map_lookup(world.maps.fds["keys"], struct.pack("=I", 0), cases.KEYS[0].nbytes)


@pytest.mark.needs("bpf", "clang", "libbpf")
def test_without_the_program_nothing_is_taken() -> None:
    """A job says that it has a key where that program is missing."""
    with contextlib.closing(KernelWorld("clang")) as world:
        for data in (cases.contribution(1), cases.tagged(cases.contribution(1))):
            world.control(tagged=1)
            assert world.take(data) == (Verdict.INACTIVE, 256)
        world.control(tagged=0)
        assert world.take(cases.contribution(1))[0] == Verdict.STORED
