"""Sums, records and marks of the udp datapath, against models of a few lines; and what no packet may do."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bare_cases
import cases
from cases import COOKIE, EXPONENT, LAYOUT, NEED, OP, RESULT_BASE, RESULT_ROWS, ROWS, SUM_BASE, SUM_ROWS, WIDTH
from tailbound.datapath.tables import CONTROL_QUEUE, CONTROLS_LOST, EVENT_QUEUE, EVENTS_LOST
from tailbound.wire import packets
from tailbound.wire.schema import (
    EXPONENT_NONE,
    HEADER_BYTES,
    OP_PER_STEP,
    Event,
    Flag,
    PacketType,
    Verdict,
    op_label,
    op_slot,
)
from udp_world import World

TAKEN = (Verdict.STORED, Verdict.ADDED)


@pytest.fixture
def world() -> World:
    return World()


def row_packet(rng: random.Random, sender: int, codes: bytes, **fields: object) -> bytes:
    values = {"owner": cases.RANK, "seq": cases.SEQ, "row": 5, "rows": ROWS, "exponent": EXPONENT, "need": NEED}
    return cases.build(PacketType.CONTRIBUTION, codes, sender=sender, **(values | fields))


def as_sums(codes: bytes, shift: int = 0) -> np.ndarray:
    return np.frombuffer(codes, np.uint8).astype(np.uint16) << shift


# --- sums ---------------------------------------------------------------------------------------------------------


@given(st.data())
def test_sums_of_shifted_short_rows_in_any_order(data: st.DataObject) -> None:
    """Rules: codec-9, kernel-16."""
    world = World(8)
    count = 16 * data.draw(st.integers(1, WIDTH // 16))
    senders = data.draw(st.permutations(range(1, 8)))
    rng = random.Random(data.draw(st.integers(0, 1 << 32)))
    rubbish = rng.randbytes(world.store.sums.nbytes)
    world.store.sums[:] = np.frombuffer(rubbish, np.uint8).reshape(world.store.sums.shape)
    expected = np.zeros(count, np.uint16)
    units, needs = 0, []
    for i, sender in enumerate(senders):
        codes, shift, need = rng.randbytes(count), rng.randrange(4), rng.randrange(-400, 400)
        packet = row_packet(rng, sender, codes, shift=shift, need=need)
        assert world.take(packet) == (Verdict.ADDED if i else Verdict.STORED, sender)
        assert world.take(packet) == (Verdict.DUPLICATE, sender)
        expected += as_sums(codes, shift)
        units += 1 << shift
        needs.append(need)
    slot = cases.SEQ & (SUM_ROWS - 1)
    assert (world.lanes(slot, count) == expected).all()
    record = world.store.slots[slot]
    assert (record["cookie"], record["op"], record["row"]) == (COOKIE, OP, 5)
    assert (record["count"], record["units"], record["need"], record["exponent"]) == (7, units, max(needs), EXPONENT)
    assert record["ranks"].tolist() == [0b11111110, 0, 0, 0]
    # nothing beyond the row's codes, and no other slot, is touched
    after = world.store.sums.tobytes()
    start, stride = slot * 2 * WIDTH, 2 * WIDTH
    assert after[:start] == rubbish[:start]
    assert after[start + 2 * count : start + stride] == rubbish[start + 2 * count : start + stride]
    assert after[start + stride :] == rubbish[start + stride :]


def test_256_ranks_fill_the_lanes() -> None:
    """Rule: codec-9."""
    world = World(256)
    world.control(shift_cap=0)
    full = bytes([255]) * 64
    for sender in range(1, 256):
        verdict, row = world.take(row_packet(random.Random(), sender, full, need=EXPONENT_NONE, rows=1, row=0))
        assert (verdict, row) == (Verdict.ADDED if sender > 1 else Verdict.STORED, sender)
    slot = cases.SEQ & (SUM_ROWS - 1)
    assert (world.lanes(slot, 64) == 255 * 255).all()
    record = world.store.slots[slot]
    assert (record["count"], record["units"], record["need"]) == (255, 255, EXPONENT_NONE)
    assert record["ranks"].tolist() == [2**64 - 2] + [2**64 - 1] * 3
    op = world.store.ops[op_slot(OP)]
    assert (op["heard_live"], op["rows_complete"]) == (255, 1)
    assert (op["heard"] == record["ranks"]).all()
    assert (op["tail_contributed"] == record["ranks"]).all()
    kinds = [kind for kind, _, _ in world.tables.take_events()]
    assert kinds == [Event.OPENED, Event.MAJORITY, Event.MAJORITY, Event.TAIL, Event.COMPLETE]


def test_seals_wrap_round_the_ring(world: World) -> None:
    world.tables.seal(OP, SUM_BASE + SUM_ROWS - 2, 4)  # the last two rows of this lap, the first two of the next
    first = SUM_BASE & (SUM_ROWS - 1)
    sealed = (world.tables.arrays["slot_locks"]["sealed_op"] == OP).nonzero()[0]
    assert set(sealed.tolist()) == {(first + d) & (SUM_ROWS - 1) for d in (-2, -1, 0, 1)}
    world.tables.seal(OP + 1, 12345, SUM_ROWS)
    assert (world.tables.arrays["slot_locks"]["sealed_op"] == OP + 1).all()


# --- results, records, marks ------------------------------------------------------------------------------------


def test_a_result_and_its_record(world: World) -> None:
    """Rule: kernel-17."""
    packet = cases.result(2, exponent=EXPONENT_NONE, scale=3.5, count=256, row=7)
    assert world.take(packet) == (Verdict.RESULT_TAKEN, 2)
    at = cases.RESULT_SEQ & (RESULT_ROWS - 1)
    assert world.store.results[at, : cases.CODES].tobytes() == packet[HEADER_BYTES:]
    assert (world.store.results[at, cases.CODES :] == 0).all()
    assert world.store.result_records[at].tolist() == (COOKIE, OP, 3.5, 256, EXPONENT_NONE, 2, 7, 0)
    assert world.store.presence[at].tolist() == (OP, COOKIE)
    assert (world.store.presence["op"] == OP).sum() == 1
    assert world.store.ops[op_slot(OP)]["results_in"] == 1


def test_an_op_record_from_its_first_packet_on(world: World) -> None:
    """Rule: kernel-15."""
    opened = world.clock + 1000
    world.take(cases.ready(3, flags=Flag.ABSTAIN))
    op = world.store.ops[op_slot(OP)]
    assert (op["cookie"], op["op"], op["opened_ns"], op["layout"]) == (COOKIE, OP, opened, LAYOUT)
    assert (op["codes"], op["rows"], op["first_sender"], op["heard_live"]) == (0, 0, 3, 1)
    assert (op["heard"][0], op["abstained"][0], op["tail_contributed"][0]) == (8, 8, 0)
    assert op["majority_ns"].tolist() == [0, 0]  # three of four are needed
    world.clock += 4_998_000
    world.take(cases.contribution(1, row=ROWS - 1))
    assert (op["codes"], op["rows"], op["heard_live"], op["progress"]) == (cases.CODES, ROWS, 2, 1)
    assert op["majority_ns"].tolist() == [opened + 4_999_000, 0]
    world.take(cases.result(2, published=OP))
    assert op["majority_ns"].tolist() == [opened + 4_999_000, opened + 5_000_000]
    arrivals = world.store.arrivals.reshape(-1, 256)[op_slot(OP)]
    assert [a.tolist() for a in arrivals[1:4]] == [(5000, 5000, 0, 5000), (5001, 0, 5001, 0), (1, 0, 0, 0)]
    assert [op[k][0] for k in ("tail_contributed", "tail_published")] == [2, 4]


def test_arrivals_of_an_earlier_op_are_forgotten(world: World) -> None:
    world.take(cases.contribution(1, row=ROWS - 1))
    later = OP + OP_PER_STEP
    assert op_slot(later) == op_slot(OP)
    world.take(cases.contribution(1, op=later))
    assert world.store.arrivals.reshape(-1, 256)[op_slot(OP), 1].tolist() == (1, 0, 0, 1)


def test_rows_behind_the_window_leave_their_stamps_and_nothing_else(world: World) -> None:
    """Deadlines are learned from true arrival times (clock-5) (kernel-14)."""
    world.take(cases.ready(2))
    op = world.store.ops[op_slot(OP)]
    world.control(sum_base=cases.SUM_BASE + 60, result_base=cases.RESULT_BASE + 100)
    world.clock += 6_998_000
    world.take(cases.contribution(1))
    world.clock += 999_000
    world.take(cases.contribution(1, row=ROWS - 1, contributed=OP))
    world.take(cases.result(3, published=OP))
    arrivals = world.store.arrivals.reshape(-1, 256)[op_slot(OP)]
    assert [arrivals[1][k] for k in ("first_us", "row_us", "contributed_us")] == [7000, 7000, 8000]
    assert [arrivals[3][k] for k in ("first_us", "row_us", "published_us")] == [8001, 0, 8001]
    assert (op["late"], op["late_results"], op["progress"], op["results_in"], op["heard_live"]) == (2, 1, 0, 0, 1)
    assert op["majority_ns"].tolist() == [0, 0]


def test_marks_only_rise_and_advertisements_follow(world: World) -> None:
    """Rule: kernel-12."""
    state = world.store.peer_states[1]
    world.take(cases.ready(contributed=OP - 1, published=OP - 2, map_known=9, incast=4, deadline=100, lateness=5))
    assert state.tolist()[:6] == (COOKIE, OP - 1, OP - 2, OP, world.clock, 0)
    assert state.tolist()[7:11] == (100, 5, 9, 4)
    noted = world.clock
    world.take(cases.ready(contributed=OP - 1, published=OP - 2, map_known=9, incast=4, deadline=100, lateness=5))
    assert state["last_ns"] == noted  # nothing new
    world.take(cases.ready(op=OP - 1, contributed=OP - 5, published=OP - 5, map_known=3, deadline=90, lateness=0))
    assert state.tolist()[:4] == (COOKIE, OP - 1, OP - 2, OP)
    assert (state["last_ns"], *state.tolist()[7:11]) == (world.clock, 90, 0, 9, 4)  # incast 0 says nothing
    world.control(cookie=COOKIE + 1)
    world.take(cases.ready(cookie=COOKIE + 1, op=OP - 1, contributed=OP - 6))
    assert state.tolist()[:4] == (COOKIE + 1, OP - 6, 0, OP - 1)


def test_the_newest_op_is_known_even_beyond_the_window(world: World) -> None:
    """Rules: clock-19, kernel-12."""
    world.take(cases.contribution(op=op_label(500, 0), seq=SUM_BASE + 10 * SUM_ROWS))
    assert world.store.peer_states[1]["newest"] == op_label(500, 0)
    assert world.store.ops["op"].sum() == 0


def test_a_probe_comes_back_as_an_echo_with_its_check_right(world: World) -> None:
    """Rule: kernel-18."""
    probe = cases.control_packet(PacketType.PROBE, bytes(range(32)), deadline=3)
    head, body = packets.parse(world.feed(probe, 1).tobytes())
    assert world.echoes[0].tolist() == [0, len(probe)]
    assert (head["type"][0], head["sender"][0], head["owner"][0], head["deadline"][0]) == (PacketType.ECHO, 0, 1, 3)
    assert body == bytes(range(32))


def test_an_echo_gives_the_round_trip(world: World) -> None:
    """Rule: kernel-18."""
    sent = world.clock + 1000 - 123_456
    world.take(cases.control_packet(PacketType.ECHO, sent.to_bytes(8, "big") + bytes(8), seq=7))
    assert world.store.peer_states[1]["rtt_ns"] == 123_456
    assert world.store.peer_states[1]["told"] == 7


def test_an_echo_counts_once_and_none_before_it(world: World) -> None:
    """Rule: kernel-18."""
    state = world.store.peer_states[1]
    told = [(world.clock - 10, 7), (world.clock - 10, 8), (world.clock - 500, 9), (world.clock + 10**9, 9)]
    for sent, seq in told:
        world.take(cases.control_packet(PacketType.ECHO, sent.to_bytes(8, "big") + bytes(8), seq=seq))
        assert (state["rtt_ns"], state["told"]) == (1010, 7)


def test_recorded_packets_do_not_say_that_their_rank_lives(world: World) -> None:
    """Rules: auth-5, kernel-12."""
    world.arm()
    state = world.store.peer_states[1]
    recorded = [
        cases.tagged(cases.ready(contributed=OP - 1, deadline=100 + i, lateness=i, incast=1 + i)) for i in (0, 1)
    ]
    world.take(recorded[0])
    noted = state.tolist()
    for i in range(4):
        world.take(recorded[i & 1])
        assert state.tolist() == noted
    world.take(cases.tagged(cases.ready(contributed=OP, deadline=200, incast=9)))
    assert (state["last_ns"], state["deadline"], state["incast"]) == (world.clock, 200, 9)


def test_a_switch_has_no_key_and_nobody_else_lacks_it(world: World) -> None:
    """Rule: auth-7."""
    world.arm()
    assert bare_cases.wrong(world) == {}


def test_marks_are_counted_by_sender_and_told_by_echoes(world: World) -> None:
    """Rule: kernel-26."""
    row = cases.contribution(1)
    world.feed(row + row, 1, segment=len(row), marked=True)  # the second is a duplicate, and came all the same
    world.feed(cases.contribution(2), 2)
    world.feed(cases.control_packet(PacketType.ECHO, bytes(16)), 1, marked=True)
    world.feed(b"\0" + row[1:], 1, marked=True)  # of another version: nobody's
    assert world.store.peer_states["marked"].tolist()[:3] == [0, 2, 0]
    head, _ = packets.parse(world.feed(cases.control_packet(PacketType.PROBE, bytes(16)), 1).tobytes())
    assert (head["type"][0], head["seq"][0]) == (PacketType.ECHO, 2)


# --- queues and received buffers --------------------------------------------------------------------------------


def test_full_queues_are_counted(world: World) -> None:
    hold = cases.control_packet(PacketType.HOLD)
    for _ in range(CONTROL_QUEUE + 3):
        world.feed(hold, 1)
    assert world.tables.state[CONTROLS_LOST] == 3
    assert world.tables.take_controls() == [hold] * CONTROL_QUEUE
    assert world.tables.take_controls() == []
    for i in range(EVENT_QUEUE + 5):
        world.feed(cases.ready(op=OP + i), 1)
        world.tables.take_controls()
    assert world.tables.state[EVENTS_LOST] == 5
    assert [op for _, op, _ in world.tables.take_events()] == list(range(OP, OP + EVENT_QUEUE))
    world.feed(hold, 1)
    assert world.tables.take_controls() == [hold]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=20), st.sampled_from([16, 64, 128, 256]))
def test_a_received_buffer_is_the_packets_in_it(rows: list[int], count: int) -> None:
    parts = [cases.contribution(1, count, row=r, seq=SUM_BASE + r) for r in rows]
    together, apart = World(), World()
    together.feed(b"".join(parts), 1, segment=len(parts[0]))
    for part in parts:
        apart.feed(part, 1)
    assert (together.ledger() == apart.ledger()).all()
    assert together.store.sums.tobytes() == apart.store.sums.tobytes()
    assert together.store.slots.tobytes() == apart.store.slots.tobytes()


def test_segments_of_an_odd_size_leave_the_last_one_unaligned(world: World) -> None:
    probe = cases.control_packet(PacketType.PROBE)
    for odd in (81, 83, 99, 101):
        before = world.ledger()
        buffer = world.feed(bytes(3 * odd) + probe, 1, segment=odd)
        counted = world.ledger() - before
        assert counted[256, Verdict.BAD_LENGTH] == 3
        assert counted[1, Verdict.REFLECTED] == 1
        assert world.echoes[0].tolist() == [3 * odd, len(probe)]
        assert packets.parse(buffer[3 * odd : 3 * odd + len(probe)].tobytes())[0]["type"][0] == PacketType.ECHO


def test_more_probes_than_can_be_answered_at_once(world: World) -> None:
    probe = cases.control_packet(PacketType.PROBE, b"")
    world.feed(probe * 100, 1, segment=len(probe))
    assert world.reflected == 64


# --- what no packet may do --------------------------------------------------------------------------------------


def untouched(world: World) -> bytes:
    store = world.store
    arrays = (store.sums, store.slots, store.results, store.result_records, store.presence, store.ops, store.arrivals)
    return b"".join(a.tobytes() for a in (*arrays, store.peer_states))


def mutated(rng: random.Random, packet: bytes) -> bytes:
    """``packet`` with some of it changed, moved, cut off or added; never the packet itself."""
    data = bytearray(packet)
    kind = rng.randrange(6)
    if kind == 0:  # within one word, where the check promises to see every change
        word = rng.randrange(len(data) // 8)
        for _ in range(rng.randrange(1, 4)):
            data[8 * word + rng.randrange(8)] ^= rng.randrange(1, 256)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        data += rng.randbytes(rng.randrange(1, 64))
    elif kind == 3:
        at = rng.randrange(len(data))
        data[at : at + 8] = rng.randbytes(8)
    elif kind == 4:
        data = bytearray(rng.randbytes(16 * rng.randrange(20)))
    else:
        data[0:2] = bytes((1, rng.randrange(1, 11)))
        data[8:64] = rng.randbytes(56)
    return bytes(data) if bytes(data) != packet else bytes(data[:-1])


def test_broken_packets_change_nothing(world: World) -> None:
    rng = random.Random(20)
    good = [
        cases.contribution(),
        cases.contribution(2, 16),
        cases.result(3),
        cases.ready(2),
        cases.contribution(3, 256),
    ]
    good += [cases.control_packet(kind, bytes(range(1, 17))) for kind in PacketType if kind > PacketType.READY]
    for packet in good:
        world.take(packet)
    world.tables.take_controls()
    before, ledger = untouched(world), world.ledger()
    for _ in range(20_000):
        packet = rng.choice(good)
        world.feed(mutated(rng, packet), rng.choice((packet[14], packet[14], packet[14], 0, 1, 2, 3)))
    assert untouched(world) == before
    counted = world.ledger() - ledger
    assert counted.sum() == 20_000
    assert counted[:256].sum() == 0
    seen = {Verdict(v) for v in counted[256].nonzero()[0]}
    assert seen >= {Verdict.BAD_LENGTH, Verdict.BAD_VERSION, Verdict.BAD_TYPE, Verdict.WRONG_COOKIE, Verdict.CORRUPT}
    assert counted[256, Verdict.CORRUPT] > 2_000
    assert world.tables.take_controls() == []


@given(st.binary(max_size=400), st.integers(0, 3), st.integers(0, 200))
def test_random_buffers_change_nothing(data: bytes, source: int, segment: int) -> None:
    world = FUZZED
    before = untouched(world)
    ledger = world.ledger().sum()
    world.feed(data, source, segment)
    assert untouched(world) == before
    assert world.ledger().sum() - ledger == max(1, -(-len(data) // segment) if segment else 1)


FUZZED = World()


@pytest.mark.parametrize("seed", range(3))
def test_packets_with_a_right_check_keep_the_books(world: World, seed: int) -> None:
    """Headers from a small world, checks right: the sums are exactly those of the packets said to be taken.

    Rules: kernel-16, kernel-21.
    """
    rng = random.Random(seed)
    sums: dict[int, np.ndarray] = {}  # by slot
    ranks: dict[int, set[int]] = {}
    verdicts = set()
    for _ in range(2000):
        kind = rng.choice((PacketType.CONTRIBUTION,) * 20 + tuple(PacketType))
        head = packets.header(
            type=kind,
            flags=rng.choice((0,) * 9 + (2, 0xFFFF & ~Flag.HALVES)),  # half bytes: test_udp_nibbles
            cookie=COOKIE,
            op=rng.choice((OP,) * 30 + (OP + 1, OP - 1, op_label(3, 257))),
            layout=rng.choice((LAYOUT,) * 40 + (1,)),
            sender=rng.choice((1, 2, 3) * 9 + (0, 200)),
            owner=rng.choice((0,) * 9 + (1, 2, 3)),
            seq=(SUM_BASE if kind == PacketType.CONTRIBUTION else RESULT_BASE) + rng.randrange(-2, 70),
            row=rng.randrange(ROWS + 1),
            rows=ROWS,
            contributed=rng.choice((0, OP)),
            exponent=rng.choice((EXPONENT,) * 9 + (5,)),
            need=rng.randrange(-32768, 32768),
            shift=rng.choice((0, 0, 0, 1, 6, 7)),
            map_id=rng.choice((cases.MAP_ID,) * 9 + (0,)),
        )
        body = rng.randbytes(rng.choice((128,) * 40 + (16, 0)))
        sender = int(head["sender"][0])
        verdict, _ = world.take(packets.packet(head, body), sender if sender < 4 else 1)
        verdicts.add(verdict)
        slot = int(head["seq"][0]) & (SUM_ROWS - 1)
        if verdict == Verdict.STORED:
            sums[slot], ranks[slot] = np.zeros(len(body), np.uint16), set()
        if verdict in TAKEN:
            assert sender not in ranks[slot]
            ranks[slot].add(sender)
            sums[slot] += as_sums(body, int(head["shift"][0]))
    assert verdicts > set(TAKEN)
    for slot, expected in sums.items():
        assert (world.lanes(slot, len(expected)) == expected).all()
        record = world.store.slots[slot]
        assert (record["count"], record["ranks"][0]) == (len(ranks[slot]), sum(1 << r for r in ranks[slot]))
