"""The send queue over real sockets, and over one that is full or refuses as told."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queue_world import ADDRESS, STRIDE, Kernel, memory
from tailbound.transport.pace import Pacer
from tailbound.transport.queue import SendQueue
from tailbound.transport.sender import Sender
from tailbound.transport.sockets import Socket, UdpSocket
from tailbound.wire.schema import PacketType

C, R = PacketType.CONTRIBUTION, PacketType.RESULT
LATER = 1 << 62
MS = 1_000_000


@pytest.fixture
def faked(bound: UdpSocket) -> tuple[SendQueue, Kernel]:
    sender = Sender([bound], dict.fromkeys((1, 2, 3), (ADDRESS, 9)))
    queue = SendQueue(sender)
    return queue, Kernel(queue)


def received(sock: Socket, count: int) -> list[bytes]:
    out = []
    for _ in range(count):
        assert select.select([sock], [], [], 5)[0], f"only {len(out)} of {count} datagrams"
        out.append(sock.recv(65536))
    assert not select.select([sock], [], [], 0)[0]
    return out


def test_everything_leaves_at_once_whole_and_in_order(bound: UdpSocket, receivers: list[socket.socket]) -> None:
    sender = Sender([bound], {r: sock.getsockname() for r, sock in enumerate(receivers)})
    queue, done = SendQueue(sender), []
    packets = memory(150)
    queue.submit(7, C, [(2, packets), (0, packets), (1, packets[:5])], LATER, done.append, 0)
    assert done == [305]
    assert queue.empty
    assert queue.again == 0
    assert received(receivers[0], 150) == received(receivers[2], 150) == [p.tobytes() for p in packets]
    assert received(receivers[1], 5) == [p.tobytes() for p in packets[:5]]
    counts = sender.counts[0]
    assert (counts.packets, counts.bytes, counts.bursts, counts.errors) == (150, packets.nbytes, 3, {})


def test_bursts_take_turns(faked: tuple[SendQueue, Kernel]) -> None:
    queue, kernel = faked
    queue.submit(7, C, [(2, memory(150)), (3, memory(65)), (1, memory(64))], LATER, None, 0)
    assert kernel.taken == [(2, 64), (3, 64), (1, 64), (2, 64), (3, 1), (2, 22)]


@given(st.lists(st.integers(0, 200), min_size=3, max_size=3), st.lists(st.integers(1, 40), max_size=4))
def test_every_packet_leaves_once_and_in_order(counts: list[int], cuts: list[int]) -> None:
    """Also where the kernel takes fewer messages than it is given."""
    with UdpSocket() as sock:
        queue = SendQueue(Sender([sock], dict.fromkeys((1, 2, 3), (ADDRESS, 9))))
        kernel = Kernel(queue)
        kernel.script = [-cut for cut in cuts]
        runs = [(1 + i, memory(count, seed=i)) for i, count in enumerate(counts)]
        queue.submit(7, C, runs, LATER, None, 0)
        assert queue.empty
        for rank, packets in runs:
            assert kernel.data[rank] == packets.tobytes()


def test_a_full_socket_is_left_and_gone_on_with(faked: tuple[SendQueue, Kernel]) -> None:
    queue, kernel = faked
    kernel.script = [-2, errno.EAGAIN]
    done: list[int] = []
    queue.submit(7, C, [(2, memory(150)), (3, memory(65))], LATER, done.append, 5)
    assert queue.full == {0}
    assert queue.again > 5
    assert (done, queue.packets, queue.waits) == ([], 87, 1)
    queue.pump(6)
    assert (queue.again, queue.full) == (0, set())
    assert done == [215]
    assert kernel.taken == [(2, 64), (3, 64), (2, 64), (3, 1), (2, 22)]


def test_a_full_device_is_tried_again_soon(faked: tuple[SendQueue, Kernel]) -> None:
    queue, kernel = faked
    kernel.always = errno.ENOBUFS
    queue.submit(7, C, [(2, memory(5))], LATER, None, 5)
    assert not queue.full
    assert 5 < queue.again <= 5 + MS
    kernel.always = 0
    queue.pump(queue.again)
    assert queue.again == 0
    assert kernel.taken == [(2, 5)]


def test_results_overtake_contributions_of_later_ops_only(faked: tuple[SendQueue, Kernel]) -> None:
    """Rule: clock-17."""
    queue, kernel = faked
    kernel.always = errno.EAGAIN
    order: list[str] = []
    queue.submit(7, C, [(1, memory(1)), (2, memory(2))], LATER, lambda n: order.append("c7"), 0)
    queue.submit(8, C, [(1, memory(3))], LATER, lambda n: order.append("c8"), 0)
    queue.submit(9, C, [], LATER, lambda n: order.append("c9"), 0)
    queue.submit(6, R, [(1, memory(4)), (3, memory(5))], LATER, lambda n: order.append("r6"), 0)
    queue.submit(7, R, [(3, memory(6))], LATER, lambda n: order.append("r7"), 0)
    kernel.always = 0
    queue.pump(1)
    assert kernel.taken == [(1, 4), (3, 5), (1, 1), (2, 2), (3, 6), (1, 3)]
    assert order == ["r6", "r7", "c7", "c8", "c9"]


def test_rows_that_were_asked_for_again_wait_for_nothing_else(faked: tuple[SendQueue, Kernel]) -> None:
    """Rule: clock-17."""
    queue, kernel = faked
    kernel.always = errno.EAGAIN
    queue.submit(7, C, [(2, memory(2))], LATER, None, 0)
    queue.submit(7, R, [(1, memory(4)), (3, memory(5))], LATER, None, 0)
    queue.submit(7, R, [(1, memory(1))], LATER, None, 0, again=True)
    assert (queue.empty, queue.submissions, queue.packets) == (False, 3, 12)
    kernel.always = 0
    queue.pump(1)
    assert kernel.taken == [(1, 1), (2, 2), (1, 4), (3, 5)]
    assert queue.empty


def test_stale_rows_are_dropped_and_counted(faked: tuple[SendQueue, Kernel]) -> None:
    """Rule: clock-17."""
    queue, kernel = faked
    kernel.always = errno.EAGAIN
    done: list[int] = []
    queue.submit(7, C, [(1, memory(3)), (2, memory(4))], 100, done.append, 0)
    queue.submit(8, C, [(1, memory(5)), (2, memory(6))], LATER, done.append, 0, over=lambda rank: rank == 2)
    kernel.always = 0
    queue.pump(101)
    assert kernel.taken == [(1, 5)]
    assert queue.stale == 3 + 4 + 6
    assert done == [0, 5]
    assert queue._sender.counts[2].lost == 10


def test_what_is_fresh_is_not_asked_about(faked: tuple[SendQueue, Kernel]) -> None:
    queue, kernel = faked
    queue.submit(7, C, [(1, memory(3))], 100, None, 0, over=lambda rank: True)
    assert kernel.taken == [(1, 3)]


def test_cancelled_memory_is_never_read_again(faked: tuple[SendQueue, Kernel]) -> None:
    queue, kernel = faked
    kernel.always = errno.EAGAIN
    done: list[int] = []
    queue.submit(7, C, [(1, memory(3))], LATER, done.append, 0)
    queue.submit(8, C, [(1, memory(4))], LATER, done.append, 0)
    assert queue.cancel(7) == 3
    assert queue.cancel(5) == 0
    assert done == [0]
    kernel.always = 0
    queue.pump(1)
    assert kernel.taken == [(1, 4)]


def test_what_a_receiver_grants_is_obeyed_for_it_alone(faked: tuple[SendQueue, Kernel]) -> None:
    queue, kernel = faked
    queue.pacer.follow(queue.pacer.limits.speed)
    queue.pacer.grant(2, 0.002)
    now = 1000 * MS
    queue.submit(7, C, [(2, memory(1300)), (1, memory(130))], LATER, None, now)
    assert sum(n for rank, n in kernel.taken if rank == 1) == 130
    first = sum(n for rank, n in kernel.taken if rank == 2)
    assert 0 < first * STRIDE <= 2.1 * 0.002 * queue.pacer.limits.speed * queue.pacer.limits.quantum / 1e9
    while not queue.empty:
        now = queue.again
        queue.pump(now)
    assert (now - 1000 * MS) / 1e9 == pytest.approx(1300 * STRIDE / (0.002 * queue.pacer.limits.speed), rel=0.25)


def test_one_turn_has_a_budget(faked: tuple[SendQueue, Kernel]) -> None:
    queue, kernel = faked
    done: list[int] = []
    queue.submit(7, C, [(1, memory(64 * 80)), (2, memory(64 * 80))], LATER, done.append, 5)
    assert len(kernel.taken) == 128
    assert queue.again == 5  # at once, but not in this turn
    while not queue.empty:
        queue.pump(6)
    assert done == [64 * 160]


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.EOPNOTSUPP])
def test_without_gso_packets_go_one_by_one(faked: tuple[SendQueue, Kernel], number: int) -> None:
    queue, kernel = faked
    kernel.script = [number]
    queue.submit(7, C, [(1, memory(3)), (2, memory(3))], LATER, None, 0)
    assert sorted(kernel.taken) == [(1, 1), (1, 1), (1, 1), (2, 3)]
    assert queue._sender.plain == {1}
    assert queue._sender.counts[1].errors == {errno.errorcode[number]: 1}


def test_a_refused_burst_is_lost_and_counted(faked: tuple[SendQueue, Kernel]) -> None:
    queue, kernel = faked
    kernel.script = [errno.EPERM]
    done: list[int] = []
    queue.submit(7, C, [(1, memory(70)), (2, memory(3))], LATER, done.append, 0)
    assert sorted(kernel.taken) == [(1, 6), (2, 3)]
    assert (queue._sender.counts[1].lost, queue._sender.counts[1].errors) == (64, {"EPERM": 1})
    assert done == [9]


def test_a_refused_connection_belongs_to_the_datagram_before(faked: tuple[SendQueue, Kernel]) -> None:
    queue, kernel = faked
    kernel.script = [errno.ECONNREFUSED]
    queue.submit(7, C, [(1, memory(3))], LATER, None, 0)
    assert kernel.taken == [(1, 3)]
    kernel.script = [errno.ECONNREFUSED] * 2
    queue.submit(8, C, [(1, memory(3))], LATER, None, 0)
    assert queue._sender.counts[1].lost == 3
    assert queue.empty


def test_control_packets_never_wait_for_room(faked: tuple[SendQueue, Kernel]) -> None:
    queue, kernel = faked
    sender = queue._sender
    kernel.always = errno.EAGAIN
    sender.send(1, b"a" * 80)
    sender.send(2, b"b" * 80)
    assert not queue.empty
    queue.pump(5)
    assert queue.full == {0}
    assert sender.counts[1].waits == sender.counts[2].waits == 1
    kernel.always = 0
    queue.pump(6)
    assert kernel.single == [((ADDRESS, 9), b"a" * 80), ((ADDRESS, 9), b"b" * 80)]
    assert queue.empty
    assert (sender.counts[1].packets, sender.counts[1].bytes, sender.counts[1].lost) == (1, 80, 0)


def test_bursts_keep_the_gap_that_receivers_need(bound: UdpSocket) -> None:
    gap = 60_000
    queue = SendQueue(Sender([bound], dict.fromkeys((1, 2), (ADDRESS, 9))), Pacer((1, 2), gap=gap))
    kernel = Kernel(queue)
    now, done = 1000 * gap, []
    queue.submit(7, C, [(2, memory(64 * 2)), (1, memory(64 * 2))], LATER, done.append, now)
    assert kernel.taken == [(2, 64)]
    assert (queue.again, queue.held, done) == (now + gap, 1, [])
    queue.submit(8, C, [(1, memory(1))], LATER, done.append, now + 1)  # a gap is between bursts, whomever they are for
    queue.pump(queue.again - 1)
    assert len(kernel.taken) == 1
    queue.pump(queue.again)
    assert kernel.taken[1:] == [(1, 64)]
    kernel.always = errno.EAGAIN
    now = queue.again
    queue.pump(now)
    assert queue.again > now + 2 * gap  # a full socket is not asked again and again
    kernel.always = 0
    now += 100 * gap
    queue.pump(now)  # what a late wake-up has missed is not made up for
    assert kernel.taken[2:] == [(2, 64)]
    while not queue.empty:
        assert queue.again == now + gap
        now = queue.again
        queue.pump(now)
    assert kernel.taken[3:] == [(1, 64), (1, 1)]
    assert done == [4 * 64, 1]
    assert queue.again == 0


def test_the_first_rows_leave_no_faster_than_the_link_is_said_to_be(bound: UdpSocket) -> None:
    """Rule: clock-24."""
    rate, size = 1_000_000, STRIDE + 42
    queue = SendQueue(Sender([bound], dict.fromkeys((1, 2), (ADDRESS, 9))), Pacer((1, 2), speed=rate, most=rate))
    kernel, begin, done = Kernel(queue), 1000 * MS, []
    queue.submit(7, C, [(1, memory(100)), (2, memory(100))], LATER, done.append, begin)
    now, held = begin, queue.held
    assert held == 1
    while not queue.empty:
        left = sum(count for _, count in kernel.taken) * size
        assert 0 <= left - rate * (now - begin) / 1e9 <= rate * 0.002 + 3 * size  # it is never idle, either
        assert queue.again > now
        queue.pump(queue.again - 1)
        assert sum(count for _, count in kernel.taken) * size == left
        now = queue.again
        queue.pump(now)
    assert now - begin == pytest.approx(200 * size * 1e9 / rate, abs=3 * MS)
    assert done == [200]
    assert {rank: len(data) for rank, data in kernel.data.items()} == {1: 100 * STRIDE, 2: 100 * STRIDE}


def test_a_peer_whose_socket_is_full_holds_up_nobody_else(receivers: list[socket.socket], bound: UdpSocket) -> None:
    others = [UdpSocket() for _ in range(3)]
    try:
        for other in others:
            other.bind((ADDRESS, 0))
        queue = SendQueue(Sender([bound, *others], dict.fromkeys((1, 2, 3), (ADDRESS, 9))))
        kernel = Ports(queue, [bound, *others])
        kernel.stuck = {2}
        queue.submit(7, C, [(1, memory(10)), (2, memory(20)), (3, memory(30))], LATER, None, 0)
        queue.submit(8, C, [(2, memory(5)), (3, memory(6))], LATER, None, 0)
        assert (kernel.taken, queue.full, queue.packets) == ([(1, 10), (3, 30), (3, 6)], {2}, 25)
        kernel.stuck.clear()
        queue.pump(1)
        assert (kernel.taken[3:], queue.full, queue.again) == ([(2, 20), (2, 5)], set(), 0)
    finally:
        for other in others:
            other.close()


@pytest.fixture
def ported(bound: UdpSocket) -> Iterator[tuple[SendQueue, list[UdpSocket], Ports]]:
    """Two peers with three source ports each."""
    others = [UdpSocket() for _ in range(6)]
    for other in others:
        other.bind((ADDRESS, 0))
    queue = SendQueue(Sender([bound, *others], dict.fromkeys((1, 2), (ADDRESS, 9))))
    yield queue, others, Ports(queue, others)
    for other in others:
        other.close()


class Ports(Kernel):
    """Remembers beside the bursts which socket each call went to, and refuses those that are full."""

    def __init__(self, queue: SendQueue, sockets: list[UdpSocket]) -> None:
        super().__init__(queue)
        self._index = {sock.fileno(): i for i, sock in enumerate(sockets)}
        self.calls: list[tuple[int, int, int]] = []  # socket, rank, bursts
        self.stuck: set[int] = set()

    def send(self, sock: Socket, count: int) -> tuple[int, int]:
        if (index := self._index[sock.fileno()]) in self.stuck:
            return 0, errno.EAGAIN
        found = super().send(sock, count)
        if found[0]:
            self.calls.append((index, self.taken[-1][0], found[0]))
        return found


def test_calls_of_a_run_take_the_source_ports_in_turn(ported: tuple[SendQueue, list[UdpSocket], Ports]) -> None:
    queue, _, kernel = ported
    queue.submit(7, C, [(1, memory(64 * 16 + 1)), (2, memory(64 * 4))], LATER, None, 0)
    of = {rank: [(port, bursts) for port, to, bursts in kernel.calls if to == rank] for rank in (1, 2)}
    assert of[1] == [(0, 4), (1, 4), (2, 4), (0, 4), (1, 1)]  # as many calls as over one socket
    assert of[2] == [(3, 4)]
    queue.submit(8, C, [(1, memory(5)), (2, memory(5))], LATER, None, 0)
    assert [port for port, _, _ in kernel.calls[-2:]] == [2, 4]  # short ops take turns, too


def test_a_full_port_hands_on_to_the_next_and_all_full_wait(
    ported: tuple[SendQueue, list[UdpSocket], Ports],
) -> None:
    queue, _, kernel = ported
    kernel.stuck = {1}
    queue.submit(7, C, [(1, memory(64 * 12))], LATER, None, 0)
    assert [port for port, _, _ in kernel.calls] == [0, 2, 0]
    assert queue.empty
    assert not queue.full  # nothing waits for that socket
    kernel.stuck = {0, 1, 2}
    done: list[int] = []
    queue.submit(8, C, [(1, memory(64)), (2, memory(64))], LATER, done.append, 0)
    assert (queue.full, queue.packets, done) == ({1, 2, 3}, 64, [])
    assert kernel.calls[-1][1] == 2  # another peer has room
    kernel.stuck = {0, 1}
    queue.pump(1)
    assert kernel.calls[-1][0] == 2
    assert done == [128]
