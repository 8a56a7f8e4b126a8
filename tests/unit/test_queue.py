"""The send queue and single packets over sockets that are full or refuse as told; one burst for all, and its group.

Over real ones: every job over udp (``test_communicator.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queue_world import ADDRESS, LATER, MS, PROBE, STRIDE, Line, Told, memory
from tailbound.errors import ConfigError
from tailbound.transport.pace import Pacer
from tailbound.transport.sender import FULL, Sender, Shared, Target
from tailbound.transport.sockets import MAX_BYTES, UdpSocket, burst_packets, ports_of
from tailbound.wire.packets import record_of
from tailbound.wire.schema import HALF, OWN_OP, PacketType

C, R = PacketType.CONTRIBUTION, PacketType.RESULT
ALL = 4


def counted(one: Target) -> tuple[int, int, int]:
    """Packets, bytes and calls."""
    return one.packets, one.bytes, one.bursts


@pytest.fixture
def line(bound: UdpSocket) -> Line:
    return Line([bound])


@given(st.lists(st.integers(0, 200), min_size=3, max_size=3), st.lists(st.integers(1, 40), max_size=4))
def test_every_packet_leaves_once_and_in_order(counts: list[int], cuts: list[int]) -> None:
    """Also where the kernel takes fewer messages than it is given."""
    with UdpSocket() as sock:
        line = Line([sock])
        line.kernel.script = [-cut for cut in cuts]
        line.submit(7, C, *enumerate(counts, 1))
        assert line.queue.empty
        for rank, count in enumerate(counts, 1):
            assert line.kernel.data[rank] == memory(count, seed=rank).tobytes()


def test_bursts_take_turns_and_one_turn_has_a_budget(line: Line) -> None:
    line.submit(7, C, (2, 150), (3, 65), (1, 64))
    assert line.taken == [(2, 64), (3, 64), (1, 64), (2, 64), (3, 1), (2, 22)]
    assert counted(line.sender.counts[2]) == (150, 150 * STRIDE, 3)
    assert (line.queue.empty, line.queue.again) == (True, 0)
    line.submit(8, C, (1, 64 * 80), (2, 64 * 80), now=5)
    assert (len(line.taken), line.queue.again) == (6 + 128, 5)  # at once, but not in this turn
    line.rest(6)
    assert line.gone == 279 + 64 * 160


def test_a_full_socket_is_left_and_gone_on_with(line: Line) -> None:
    queue = line.queue
    line.kernel.script = [-2, errno.EAGAIN]
    line.submit(7, C, (2, 150), (3, 65), now=5)
    assert (queue.full, line.gone, queue.said.left, queue.said.waits) == (1, 0, 87, 1)
    assert queue.again > 5
    queue.pump(6)
    assert (queue.again, queue.full, line.gone) == (0, 0, 215)
    assert line.taken == [(2, 64), (3, 64), (2, 64), (3, 1), (2, 22)]
    line.kernel.always = errno.ENOBUFS  # of the device, which makes no event of a socket
    line.submit(8, C, (2, 5), now=7)
    assert not queue.full
    assert 7 < queue.again <= 7 + MS
    line.go(queue.again)
    assert (queue.again, line.gone) == (0, 220)


def test_who_goes_first(line: Line) -> None:
    """Results overtake contributions of later ops only. Rule: clock-17."""
    given: list[Any] = [(7, C, (1, 1), (2, 2)), (8, C, (1, 3)), (9, C), (6, R, (1, 4), (3, 5)), (7, R, (3, 6))]
    order = [(1, 4), (3, 5), (1, 1), (2, 2), (3, 6), (1, 3)]
    line.kernel.always = errno.EAGAIN
    for op, kind, *runs in given:
        line.submit(op, kind, *runs)
    assert line.queue.said.left == sum(count for _, count in order)
    line.go()
    assert (line.taken, line.gone, line.queue.empty) == (order, 21, True)


def test_stale_rows_are_dropped_and_counted(bound: UdpSocket) -> None:
    """Rule: clock-17."""
    told = Told()
    line = Line([bound], voice=told.voice)
    line.submit(6, C, (1, 3), until=100)
    told.published(8, 1, 2)
    told.gone(3)
    line.kernel.always = errno.EAGAIN
    line.submit(7, C, (3, 4), until=100)
    line.submit(8, C, (1, 5), (2, 6), (3, 7))
    line.submit(9, C, (2, 8))
    line.submit(8, R, (1, 9), (3, 10))
    line.go(101)
    assert line.taken == [(1, 3), (3, 7), (1, 9), (2, 8)]
    assert (line.queue.said.stale, line.gone) == (4 + 5 + 6 + 10, 3 + 9 + 7 + 8)
    assert [line.sender.counts[rank].lost for rank in (1, 2, 3)] == [5, 6, 14]


def test_marks_of_another_job_or_a_switch_make_no_row_stale(bound: UdpSocket) -> None:
    """A switch publishes row by row."""
    told = Told(ranks=3)
    told.published(9, 1, 3)
    told.states["cookie"][1] -= 1
    line = Line([bound], voice=told.voice)
    line.kernel.always = errno.EAGAIN
    line.submit(8, C, (1, 5), (2, 6), (3, 7))
    line.go()
    assert (line.taken, line.queue.said.stale) == ([(1, 5), (2, 6), (3, 7)], 0)


def test_cancelled_memory_is_never_read_again(line: Line) -> None:
    line.kernel.always = errno.EAGAIN
    line.submit(7, C, (1, 3))
    line.submit(8, C, (1, 4))
    assert (line.queue.cancel(7), line.queue.cancel(5), line.gone) == (3, 0, 0)
    line.go()
    assert line.taken == [(1, 4)]


def test_the_own_mark_rises_in_order_and_past_what_was_cancelled(bound: UdpSocket) -> None:
    """The last op is over before its rows have left, and none will."""
    told, ops = Told(), [record_of(OWN_OP)(label=label) for label in (7, 8, 9)]
    line, told.marks.contributed, told.marks.published = Line([bound], voice=told.voice), 6, 6
    halves, rows = [record_of(HALF)() for _ in range(2)], memory(3)
    line.kernel.always = errno.EAGAIN
    for op in ops:
        op.halves[:] = [*map(ctypes.addressof, halves)]
        line.queue.submit(op.label, C, [(1, rows)], LATER, 0, ctypes.addressof(op))
    assert (line.queue.cancel(9), told.marks.contributed) == (3, 6)
    line.go()
    assert ([op.left for op in ops], told.marks.contributed, line.queue.said.contributions) == ([1, 1, 0], 9, 6)
    assert line.queue.empty


def test_the_memory_of_a_queue_outlives_the_program(bound: UdpSocket) -> None:
    """Its thread may still be at work at exit, when other finalizers wait."""
    known = set(weakref.finalize._registry)  # type: ignore[attr-defined]
    line = Line([bound])
    made = set(weakref.finalize._registry) - known  # type: ignore[attr-defined]
    assert (line.queue.empty, [one.atexit for one in made]) == (True, [False])


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.EOPNOTSUPP])
def test_without_gso_packets_go_one_by_one(line: Line, number: int) -> None:
    """Another rank may lose it in the turn in which it works for one again: as many are plain then."""
    line.kernel.script = [number]
    line.submit(7, C, (1, 3), (2, 3))
    assert sorted(line.taken) == [(1, 1), (1, 1), (1, 1), (2, 3)]
    assert (line.sender.plain, line.sender.counts[1].errors) == ({1}, {errno.errorcode[number]: 1})
    line.sender.plain.symmetric_difference_update({1, 2})
    line.submit(8, C, (1, 3), (2, 3))
    assert sorted(line.taken[4:]) == [(1, 3)] + [(2, 1)] * 3


def test_a_refused_burst_is_lost_and_counted(line: Line) -> None:
    line.kernel.script = [errno.EPERM]
    line.submit(7, C, (1, 70), (2, 3))
    assert (sorted(line.taken), line.gone, line.sender.counts[1].lost) == ([(1, 6), (2, 3)], 73 - 64, 64)
    assert (line.sender.counts[1].errors, line.queue.empty) == ({"EPERM": 1}, True)


def test_bursts_keep_the_gap_that_receivers_need(bound: UdpSocket) -> None:
    gap = 60_000
    line = Line([bound], Pacer((1, 2, 3), gap=gap))
    queue, now = line.queue, 1000 * gap
    line.submit(7, C, (2, 64 * 2), (1, 64 * 2), now=now)
    assert (line.taken, line.gone, queue.again, queue.said.held) == ([(2, 64)], 0, now + gap, 1)
    line.submit(8, C, (1, 1), now=now + 1)  # a gap is between bursts, whomever they are for
    for at, taken in ((queue.again - 1, []), (queue.again, [(1, 64)])):
        queue.pump(at)
        assert line.taken[1:] == taken
    line.kernel.always = errno.EAGAIN
    now = queue.again
    queue.pump(now)
    assert queue.again > now + 2 * gap  # a full socket is not asked again and again
    now += 100 * gap
    line.go(now)  # what a late wake-up has missed is not made up for
    assert line.taken[2:] == [(2, 64)]
    assert line.rest(now) == now + 2 * gap
    assert (line.taken[3:], line.gone, queue.again) == ([(1, 64), (1, 1)], 4 * 64 + 1, 0)


@pytest.fixture
def ported() -> Iterator[Line]:
    """Three source ports for each of three peers, behind one for single packets."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(UdpSocket()) for _ in range(10)]
        for sock in sockets:
            sock.bind((ADDRESS, 0))
        yield Line(sockets)


def test_few_peers_have_several_source_ports_each_and_calls_of_a_run_take_them_in_turn(ported: Line) -> None:
    assert [ports_of(peers) for peers in (1, 2, 3, 4, 1000)] == [4, 3, 2, 1, 1]
    ported.submit(7, C, (1, 64 * 16 + 1), (2, 64 * 4))
    calls = sorted(ported.kernel.calls, key=lambda call: call[0] > 3)
    assert calls == [(1, 4), (2, 4), (3, 4), (1, 4), (2, 1), (4, 4)]  # the last one is of rank 2
    ported.submit(8, C, (1, 5), (2, 5))
    assert [port for port, _ in ported.kernel.calls[-2:]] == [3, 5]  # short ops take turns, too


def test_a_full_port_hands_on_to_the_next_and_all_full_hold_up_nobody_else(ported: Line) -> None:
    ported.kernel.stuck = {2}
    ported.submit(7, C, (1, 64 * 12))
    assert [port for port, _ in ported.kernel.calls] == [1, 3, 1]
    assert (ported.queue.empty, ported.queue.full) == (True, 0)  # nothing waits for that socket
    ported.kernel.stuck = {1, 2, 3}
    ported.submit(8, C, (1, 64), (2, 64))
    assert (ported.queue.full, ported.queue.said.left, ported.gone) == (0b1110, 64, 768)
    assert ported.kernel.calls[-1][0] == 4  # of rank 2, for which there is room
    ported.kernel.stuck = {1, 2}
    ported.queue.pump(1)
    assert (ported.kernel.calls[-1][0], ported.gone) == (3, 768 + 128)


# -- one burst for all ----------------------------------------------------------------------------------------------


@pytest.fixture
def shared(bound: UdpSocket) -> Shared:
    return Shared("fanout", bound, (ADDRESS, 7), (2, 3, 1))


@pytest.fixture
def fanned(bound: UdpSocket, shared: Shared) -> Line:
    return Line([bound], shared=shared)


def test_a_burst_for_all_leaves_once_and_counts_for_each(fanned: Line, shared: Shared) -> None:
    fanned.submit(7, R, (ALL, 150))
    assert (fanned.taken, fanned.gone) == ([(ALL, 64), (ALL, 64), (ALL, 22)], 450)
    assert [counted(fanned.sender.counts[rank]) for rank in (1, 2, 3)] == [(150, 150 * STRIDE, 0)] * 3
    assert counted(shared.counts) == (150, 150 * STRIDE, 3)
    fanned.kernel.script = [-1, errno.EAGAIN]
    fanned.submit(8, R, (ALL, 100))
    shared.ranks = (2, 1)  # who has left is not charged
    fanned.queue.pump(1)
    assert [fanned.sender.counts[rank].packets for rank in (1, 2, 3)] == [250, 250, 214]
    assert fanned.gone == 450 + 3 * 64 + 2 * 36


def test_it_keeps_the_order_of_each_of_its_ranks(fanned: Line) -> None:
    fanned.queue.pacer.hold_to(2, 1e6)
    fanned.submit(7, C, (1, 3), (2, 50), now=10 * MS)
    before = fanned.taken.copy()
    assert (1, 3) in before
    fanned.submit(7, R, (ALL, 2), now=10 * MS)  # behind what is older for rank 2
    assert fanned.taken == before
    fanned.submit(8, R, (1, 4), now=10 * MS)  # behind that
    fanned.rest(10 * MS + 1)
    order = [rank for rank, _ in fanned.taken[len(before) :]]
    assert (order[-2:], set(order[:-2])) == ([ALL, 1], {2})


def test_it_goes_as_slowly_as_its_slowest_rank_and_all_pay(bound: UdpSocket, shared: Shared) -> None:
    pacer = Pacer((1, 2, 3))
    pacer.link.quantum = 1 * MS
    line, slow = Line([bound], pacer, shared), 64 * STRIDE * 1000.0  # one burst a millisecond
    pacer.hold_to(1, slow)
    pacer.hold_to(3, 10 * slow)
    line.submit(7, R, (ALL, 640), now=100 * MS)
    now = line.rest(100 * MS)
    assert now - 100 * MS >= 8 * MS  # a quantum may leave at once, and one before it is used up
    assert (line.gone, line.queue.said.held > 0) == (3 * 640, True)
    assert pacer.paths[1].spent > pacer.paths[3].spent > now - 2 * MS


def test_a_burst_that_is_cloned_here_costs_as_many(fanned: Line, shared: Shared, bound: UdpSocket) -> None:
    """So that one turn of the loop does not last N times as long; and copies wait in this host."""
    fanned.submit(7, R, (ALL, 64 * 100))
    assert (len(fanned.taken), fanned.queue.empty) == (-(-128 // 3), False)
    fanned.rest(1)
    assert fanned.sender.room == (1 + 3) * bound.room()
    shared.local = False
    fanned.submit(8, R, (ALL, 64 * 100))
    assert (len(fanned.taken), fanned.sender.room) == (200, (1 + 1) * bound.room())


@pytest.mark.parametrize(("local", "times"), [(True, 3), (False, 1)])
def test_clones_take_their_part_of_the_link(bound: UdpSocket, shared: Shared, local: bool, times: int) -> None:
    """Copies that this host makes leave over its link; those that the network makes do not. Rule: clock-24."""
    shared.local = local
    line = Line([bound], Pacer((1, 2, 3), speed=1e6, most=1e6), shared)
    line.submit(7, R, (ALL, 100), now=1000 * MS)
    took = line.rest(1000 * MS) - 1000 * MS
    assert line.gone == 300
    assert took == pytest.approx(100 * times * (STRIDE + 42) * 1000, abs=3 * MS)


def test_what_is_refused_or_stale_is_lost_for_everybody(bound: UdpSocket, shared: Shared) -> None:
    told = Told()
    fanned = Line([bound], shared=shared, voice=told.voice)
    fanned.kernel.always = errno.EAGAIN
    fanned.submit(7, R, (ALL, 3), until=100)
    fanned.submit(8, R, (ALL, 4))
    told.gone(1, 3)  # one rank still wants it
    fanned.go(101)
    fanned.kernel.always = errno.EAGAIN
    fanned.submit(9, R, (ALL, 5))
    told.gone(1, 2, 3)
    fanned.go(102)
    assert (fanned.taken, shared.broken) == ([(ALL, 4)], False)
    told.gone()
    fanned.kernel.always = errno.ENETUNREACH
    fanned.submit(10, R, (ALL, 70), now=102)
    assert (fanned.gone, shared.broken, shared.counts.errors) == (12, True, {"ENETUNREACH": 2})
    assert [fanned.sender.counts[rank].lost for rank in (1, 2, 3)] == [78, 78, 78]


def test_probes_follow_for_every_rank_and_know_what_they_wait_behind(bound: UdpSocket, shared: Shared) -> None:
    line = Line([bound], shared=shared, clock=lambda: 5, voice=Told().voice)
    line.submit(7, R, (ALL, 64))
    assert [rank for rank, _ in line.kernel.probes] == [1, 2, 3]
    pacer = line.queue.pacer
    for rank in (1, 2, 3):
        assert counted(line.sender.counts[rank]) == (65, 64 * STRIDE + PROBE, 1)
        path = pacer.paths[rank]
        assert (path.sent, path.count, path.queued) == (5, 64, pacer.link.leaves - 5)
    assert pacer.link.leaves > 5


# -- single packets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "taken", "errors"),
    [
        ([0], 1, {}),
        *(([number], 0, {errno.errorcode[number]: 1}) for number in (errno.EPERM, errno.ENETUNREACH, errno.EBADF)),
        ([errno.EAGAIN, errno.EPERM], 0, {"EPERM": 1}),  # what waits may be refused
    ],
)
def test_packets_leave_or_are_counted_as_lost(
    line: Line, script: list[int], taken: int, errors: dict[str, int]
) -> None:
    line.kernel.script = script
    line.queue.say(1, b"a" * 80)
    line.queue.pump(1)
    assert line.kernel.single == [((ADDRESS, 9001), b"a" * 80)] * taken
    c = line.sender.counts[1]
    assert (c.packets, c.bytes, c.bursts, c.lost, c.errors) == (taken, 80 * taken, taken, 1 - taken, errors)


@pytest.mark.parametrize("number", FULL)
def test_what_finds_no_room_leaves_later_in_its_order(line: Line, number: int) -> None:
    sender, counts, line.kernel.always = line.sender, line.sender.counts[1], number
    for i in range(3):
        line.queue.say(1 + i % 2, bytes([i]))
    line.queue.pump(5)
    # a full device makes no event of a socket that has room, so it is tried again by time
    assert (line.queue.full, line.queue.again > 5) == (number == errno.EAGAIN, True)
    assert (line.queue.empty, counts.waits, counts.errors, counts.lost) == (False, 2, {}, 0)
    line.kernel.script, line.kernel.always = [-1, number], 0
    line.rest(6)
    assert [(target[1], data) for target, data in line.kernel.single] == [(9001, b"\0"), (9002, b"\1"), (9001, b"\2")]
    assert [sender.counts[rank].packets for rank in (1, 2)] == [2, 1]


def test_the_oldest_give_way_when_too_many_wait(line: Line) -> None:
    sender, line.kernel.always = line.sender, errno.EAGAIN
    line.queue.say(2, b"oldest")
    for _ in range(1024):
        line.queue.say(1, b"x")
    assert (line.queue.said.words, sender.counts[2].lost, sender.counts[1].lost) == (1024, 1, 0)


@pytest.mark.parametrize(("stride", "packets"), [(1472, 44), (80, 64), (8960, 7), (1023, 64), (1024, 63), (65507, 1)])
def test_packets_of_a_burst(stride: int, packets: int) -> None:
    assert burst_packets(stride) == packets
    for wrong in (0, -1, MAX_BYTES + 1):
        with pytest.raises(ConfigError, match="give 1"):
            burst_packets(wrong)


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one that is bound"):
        Sender([], {})
