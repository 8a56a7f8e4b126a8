"""One burst for all: its turn among the others, its rate, its limits, and the books by rank."""

from __future__ import annotations

import errno

import pytest

from queue_world import ADDRESS, STRIDE, Kernel, memory
from tailbound.transport.pace import PaceConfig, Pacer
from tailbound.transport.probe import EVERY
from tailbound.transport.queue import SendQueue
from tailbound.transport.sender import Sender, Shared
from tailbound.transport.sockets import UdpSocket
from tailbound.wire.schema import MAX_RANKS, PacketType

C, R = PacketType.CONTRIBUTION, PacketType.RESULT
LATER = 1 << 62
MS = 1_000_000
ALL = MAX_RANKS


@pytest.fixture
def shared(bound: UdpSocket) -> Shared:
    return Shared("fanout", (bound,), (ADDRESS, 7), (2, 3, 1))


@pytest.fixture
def faked(bound: UdpSocket, shared: Shared) -> tuple[SendQueue, Kernel]:
    sender = Sender([bound], dict.fromkeys((1, 2, 3), (ADDRESS, 9)))
    assert sender.share(shared) == ALL
    queue = SendQueue(sender)
    return queue, Kernel(queue)


def limited(queue: SendQueue, **rates: float) -> None:
    """Gives rank 1, 2, ... a rate."""
    for name, rate in rates.items():
        rank = int(name[1:])
        queue.pacer.paths[rank].rate = rate
        queue.pacer.limited.add(rank)


def test_it_leaves_once_and_counts_for_everybody(faked: tuple[SendQueue, Kernel], shared: Shared) -> None:
    queue, kernel = faked
    done: list[int] = []
    queue.submit(7, R, [(ALL, memory(150))], LATER, done.append, 0)
    assert kernel.taken == [(ALL, 64), (ALL, 64), (ALL, 22)]
    assert done == [450]
    sender = queue._sender
    for rank in (1, 2, 3):
        counts = sender.counts[rank]
        assert (counts.packets, counts.bytes, counts.bursts, counts.lost) == (150, 150 * STRIDE, 0, 0)
    assert (shared.counts.packets, shared.counts.bytes, shared.counts.bursts) == (150, 150 * STRIDE, 3)
    assert sender.packets == 450


def test_who_has_left_is_not_charged(faked: tuple[SendQueue, Kernel], shared: Shared) -> None:
    queue, kernel = faked
    kernel.script = [-1, errno.EAGAIN]
    done: list[int] = []
    queue.submit(7, R, [(ALL, memory(100))], LATER, done.append, 0)
    shared.ranks = (2, 1)
    queue.pump(1)
    counts = queue._sender.counts
    assert (counts[1].packets, counts[2].packets, counts[3].packets) == (100, 100, 64)
    assert done == [3 * 64 + 2 * 36]


def test_it_waits_for_what_is_older_for_any_of_its_ranks(faked: tuple[SendQueue, Kernel]) -> None:
    queue, kernel = faked
    limited(queue, r2=1e6)
    queue.submit(7, C, [(1, memory(3)), (2, memory(50))], LATER, None, 10 * MS)
    before = kernel.taken.copy()
    assert (1, 3) in before
    assert queue.packets > 0
    queue.submit(7, R, [(ALL, memory(2))], LATER, None, 10 * MS)
    assert kernel.taken == before
    now = 10 * MS
    while not queue.empty:
        now = max(now + 1, queue.again)
        queue.pump(now)
    assert sum(n for rank, n in kernel.taken if rank == ALL) == 2
    assert kernel.taken.index(next(t for t in kernel.taken if t[0] == ALL)) > max(
        i for i, (rank, _) in enumerate(kernel.taken) if rank == 2
    )


def test_what_comes_later_for_one_rank_waits_for_it(faked: tuple[SendQueue, Kernel]) -> None:
    queue, kernel = faked
    kernel.always = errno.EAGAIN
    queue.submit(6, R, [(ALL, memory(1))], LATER, None, 0)
    queue.submit(7, R, [(1, memory(4))], LATER, None, 0)
    kernel.always = 0
    queue.pump(1)
    assert kernel.taken == [(ALL, 1), (1, 4)]


def test_it_goes_as_slowly_as_its_slowest_rank_and_all_pay(bound: UdpSocket, shared: Shared) -> None:
    pacer = Pacer((1, 2, 3), PaceConfig(quantum=1 * MS))
    queue = SendQueue(Sender([bound], dict.fromkeys((1, 2, 3), (ADDRESS, 9))), pacer)
    queue._sender.share(shared)
    kernel = Kernel(queue)
    slow = 64 * STRIDE * 1000.0  # one burst a millisecond
    limited(queue, r1=slow, r3=10 * slow)
    now = 100 * MS
    queue.submit(7, R, [(ALL, memory(640))], LATER, None, now)
    while not queue.empty:
        assert queue.again > now
        now = queue.again
        queue.pump(now)
    assert sum(n for _, n in kernel.taken) == 640
    assert now - 100 * MS >= 8 * MS  # a quantum may leave at once, and one before it is used up
    assert queue.held > 0
    assert pacer.room(1, STRIDE, now)[0] <= 64
    assert pacer.room(3, STRIDE, now)[0] > 64


def test_a_burst_that_is_cloned_here_costs_as_many(faked: tuple[SendQueue, Kernel], shared: Shared) -> None:
    """So that one turn of the loop does not last N times as long."""
    queue, kernel = faked
    queue.submit(7, R, [(ALL, memory(64 * 100))], LATER, None, 0)
    assert len(kernel.taken) == -(-128 // 3)
    assert queue.again == 0 or not queue.empty
    queue.pump(1)
    queue.pump(2)
    assert len(kernel.taken) == 100
    shared.local = False
    queue.submit(8, R, [(ALL, memory(64 * 100))], LATER, None, 0)
    assert len(kernel.taken) == 200


def test_copies_that_this_host_makes_wait_in_it_too(bound: UdpSocket, shared: Shared) -> None:
    """They belong to no socket: 63 of each burst waited where one was known of, and looked like the network's queue."""
    sender = Sender([bound], dict.fromkeys((1, 2, 3), (ADDRESS, 9)))
    one = sender.room
    sender.share(shared)
    shared.ranks = (1, 2, 3)
    assert sender.room == one + 3 * bound.room()
    shared.local = False
    assert sender.room == one + bound.room()


def test_clones_take_their_part_of_the_link(bound: UdpSocket, shared: Shared) -> None:
    """Copies that this host makes leave over its link; those that the network makes do not."""
    sender = Sender([bound], dict.fromkeys((1, 2, 3), (ADDRESS, 9)))
    sender.share(shared)
    for local, least in ((True, 3), (False, 1)):
        shared.local = local
        queue = SendQueue(sender, Pacer((1, 2, 3), speed=1e6, most=1e6))
        kernel = Kernel(queue)
        queue.submit(7, R, [(ALL, memory(100))], LATER, None, 1000 * MS)
        now = 1000 * MS
        while not queue.empty:
            now = queue.again
            queue.pump(now)
        assert sum(count for _, count in kernel.taken) == 100
        assert now - 1000 * MS == pytest.approx(100 * least * (STRIDE + 42) * 1000, abs=3 * MS)


def test_refused_for_good_it_is_broken_and_lost_for_everybody(faked: tuple[SendQueue, Kernel], shared: Shared) -> None:
    queue, kernel = faked
    kernel.always = errno.ENETUNREACH
    done: list[int] = []
    queue.submit(7, R, [(ALL, memory(70))], LATER, done.append, 0)
    assert done == [0]
    assert shared.broken
    assert shared.counts.errors == {"ENETUNREACH": 2}
    assert [queue._sender.counts[rank].lost for rank in (1, 2, 3)] == [70, 70, 70]
    assert queue._sender.counts[1].errors == {}


def test_stale_rows_are_lost_for_everybody(faked: tuple[SendQueue, Kernel]) -> None:
    queue, kernel = faked
    kernel.always = errno.EAGAIN
    queue.submit(7, R, [(ALL, memory(3))], 100, None, 0)
    queue.submit(8, R, [(ALL, memory(4))], LATER, None, 0, over=lambda rank: rank != 2)
    queue.submit(9, R, [(ALL, memory(5))], LATER, None, 0, over=lambda rank: True)
    kernel.always = 0
    queue.pump(101)
    assert kernel.taken == [(ALL, 4)]  # one rank still wants it
    assert [queue._sender.counts[rank].lost for rank in (1, 2, 3)] == [8, 8, 8]


def test_probes_follow_for_every_rank(faked: tuple[SendQueue, Kernel]) -> None:
    class Probes:
        waits = False

        def __init__(self) -> None:
            self.counted: list[tuple[int, int, int]] = []

        def left(self, rank: int, size: int, packets: int, now: int, limited: bool) -> bool:
            self.counted.append((rank, size, packets))
            return False

    queue, _ = faked
    probes = Probes()
    queue.prober = probes  # type: ignore[assignment]
    queue.submit(7, R, [(ALL, memory(64))], LATER, None, 0)
    assert probes.counted == [(rank, 64 * STRIDE, 64) for rank in (2, 3, 1)]
    assert 64 * STRIDE < EVERY
