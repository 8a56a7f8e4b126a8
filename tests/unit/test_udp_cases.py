"""The udp datapath: tables of cases through the C library and the model of its rules in plain Python, and more.

All memory of the two is the same to the byte, stamps included, after each case and after the life of a job under random
packets. Rules: clock-19, kernel-12 to kernel-18, kernel-21. Behind them are full lanes, echoes, queues and buffers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cases
import packed
import rule_cases
from case_worlds import udp_before
from cases import OP, SUM_BASE
from reference_worker import ReferenceTables
from tailbound.datapath.udp import CONTROLS_LOST, EVENTS_LOST
from tailbound.wire.schema import PacketType, Verdict
from twins import Attack, Twins
from udp_world import Tables, World

#: Only frames or switches can earn these.
ELSEWHERE = {
    Verdict.NOT_LINEAR, Verdict.FRAGMENT, Verdict.SCALE_MISMATCH, Verdict.ABANDONED, Verdict.ANSWERED, Verdict.FLUSHED,
    Verdict.FORGED,
}  # fmt: skip
BOTH: tuple[Any, ...] = Tables, ReferenceTables


def same_bytes(one: World, other: World) -> None:
    for name, array in one.tables.arrays.items():
        assert array.tobytes() == other.tables.arrays[name].tobytes(), name


@pytest.mark.parametrize("armed", [False, True], ids=["check", "tag"])
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_case(case: cases.Case, armed: bool) -> None:
    """In a job with a key, too (auth-1, auth-2), with FORGED for what is damaged."""
    case, worlds = cases.with_tags(case) if armed else case, []
    for make in BOTH:
        world = udp_before(case, armed=armed, make=make)
        world.tables.source.take()
        world.tables.take_controls()
        sums, results = world.store.sums.copy(), world.store.results.copy()
        assert world.take(case.packet, case.source) == (case.verdict, case.sender)
        if case.events is not None:
            assert tuple(kind for kind, _, _ in world.tables.source.take()) == case.events
        assert (world.store.sums != sums).any() == (case.verdict in (Verdict.STORED, Verdict.ADDED))
        assert (world.store.results != results).any() == (case.verdict == Verdict.RESULT_TAKEN)
        passed = [case.packet] if case.verdict == Verdict.CONTROL_PASSED else []
        assert world.tables.take_controls() == passed
        assert world.reflected == (case.verdict == Verdict.REFLECTED)
        worlds.append(world)
    if case.verdict != Verdict.CORRUPT:  # which may leave its codes where no rank reads (kernel-9)
        same_bytes(*worlds)


def test_every_verdict_has_a_case() -> None:
    assert set(Verdict) - ELSEWHERE == {case.verdict for case in cases.CASES}


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("check", rule_cases.CHECKS)
def test_rules(check: Callable[[Any], None], make: Any) -> None:
    check(World(make=make))


@pytest.mark.parametrize("seed", range(3))
def test_the_life_of_a_job(seed: int) -> None:
    """Random packets while the host goes on: the same verdicts and events one by one, the same memory at the end."""
    twins = Twins(World(), World(make=ReferenceTables))
    twins.live(random.Random(seed), 1500)
    assert len(twins.counts) > 20, twins.counts
    same_bytes(twins.kernel, twins.udp)


def test_an_attack_on_a_job_with_a_key() -> None:
    attack = Attack(World(), World(make=ReferenceTables))
    attack.send(random.Random(7), 500)
    attack.end()


#: Entries of either queue (``host_lib/core/user.h``).
QUEUE = 1024


@pytest.fixture
def world() -> World:
    return World()


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
    recorded = [cases.ready(contributed=OP - 1, deadline=100 + i, lateness=i) for i in (0, 1)]
    world.take(cases.tagged(recorded[0]))
    noted = state.tolist()
    for packet in recorded * 2:
        world.take(cases.tagged(packet))
        assert state.tolist() == noted
    world.take(cases.tagged(cases.ready(contributed=OP, deadline=200)))
    assert (state["last_ns"], state["deadline"]) == (world.clock, 200)


def test_marks_are_counted_by_sender_and_told_by_echoes(world: World) -> None:
    """Rule: kernel-26."""
    row = cases.contribution(1)
    world.feed(row + row, 1, segment=len(row), marked=True)  # the second is a duplicate, and came all the same
    world.feed(cases.contribution(2), 2)
    world.feed(cases.control_packet(PacketType.ECHO, bytes(16)), 1, marked=True)
    world.feed(b"\0" + row[1:], 1, marked=True)  # of another version: nobody's
    assert world.store.peer_states["marked"].tolist()[:3] == [0, 2, 0]
    head, _ = packed.parse(world.feed(cases.control_packet(PacketType.PROBE, bytes(16)), 1).tobytes())
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
    assert [op for _, op, _ in world.tables.source.take()] == list(range(OP, OP + QUEUE))
    world.feed(hold, 1)
    assert world.tables.take_controls() == [hold]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=20), st.sampled_from([16, 64, 128, 256]))
def test_a_received_buffer_is_the_packets_in_it(rows: list[int], count: int) -> None:
    parts = [cases.contribution(1, count, row=r, seq=SUM_BASE + r) for r in rows]
    together, apart = World(), World()
    together.feed(b"".join(parts), 1, segment=len(parts[0]))
    for part in parts:
        apart.feed(part, 1)
    for name in ("ledger", "sums", "slots"):
        assert getattr(together.store, name).tobytes() == getattr(apart.store, name).tobytes()


def test_segments_of_an_odd_size_leave_the_last_one_unaligned(world: World) -> None:
    probe = cases.control_packet(PacketType.PROBE)
    for odd in (81, 83, 99, 101):
        before = world.ledger()
        buffer = world.feed(bytes(3 * odd) + probe, 1, segment=odd)
        counted = world.ledger() - before
        assert counted[256, Verdict.BAD_LENGTH] == 3
        assert counted[1, Verdict.REFLECTED] == 1
        assert world.echoes[0].tolist() == [3 * odd, len(probe)]
        assert packed.parse(buffer[3 * odd : 3 * odd + len(probe)].tobytes())[0]["type"][0] == PacketType.ECHO
    probe = cases.control_packet(PacketType.PROBE, b"")
    world.feed(probe * 100, 1, segment=len(probe))
    assert world.reflected == 64  # more than can be answered at once
