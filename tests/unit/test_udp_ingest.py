"""The udp datapath where a case of one packet does not suffice: full lanes, echoes, queues, received buffers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cases
from cases import OP, SUM_BASE, SUM_ROWS
from tailbound.datapath.tables import CONTROLS_LOST, EVENTS_LOST
from tailbound.wire import packets
from tailbound.wire.schema import EXPONENT_NONE, Event, PacketType, Verdict, op_slot
from udp_world import World

#: Entries of either queue (``host_lib/core/user.h``).
QUEUE = 1024


@pytest.fixture
def world() -> World:
    return World()


def test_256_ranks_fill_the_lanes() -> None:
    """Rule: codec-9."""
    world = World(256)
    world.control(shift_cap=0)
    fields = {"owner": cases.RANK, "seq": cases.SEQ, "exponent": cases.EXPONENT, "need": EXPONENT_NONE, "rows": 1}
    for sender in range(1, 256):
        packet = cases.build(PacketType.CONTRIBUTION, bytes([255]) * 64, sender=sender, **fields)
        verdict, row = world.take(packet)
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


def test_full_queues_are_counted(world: World) -> None:
    hold = cases.control_packet(PacketType.HOLD)
    for _ in range(QUEUE + 3):
        world.feed(hold, 1)
    assert world.tables.state[CONTROLS_LOST] == 3
    assert world.tables.take_controls() == [hold] * QUEUE
    assert world.tables.take_controls() == []
    for i in range(QUEUE + 5):
        world.feed(cases.ready(op=OP + i), 1)
        world.tables.take_controls()
    assert world.tables.state[EVENTS_LOST] == 5
    assert [op for _, op, _ in world.tables.take_events()] == list(range(OP, OP + QUEUE))
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
