"""The rate control: probes, rules one by one (clock-24), and what a rank takes its pace to be: its link, or less."""

from __future__ import annotations

import ctypes
import errno

import pytest

from packed import parse
from queue_world import COOKIE, MS, STRIDE, Line, Told
from tailbound.kernel.core import core
from tailbound.transport.keys import KeyRing
from tailbound.transport.pace import Pacer
from tailbound.transport.sockets import UdpSocket
from tailbound.wire.ranks import bitmap
from tailbound.wire.schema import HEADER_BYTES, PacketType

C = PacketType.CONTRIBUTION
SECOND = 1_000_000_000
#: A target of round trips, and the least that is left of a link of ``SPEED`` that ``PEERS`` share.
TARGET, SPEED, PEERS = 8 * MS, 1.25e8, 20
LEAST = SPEED / PEERS / 2


def slow_down(pacer: Pacer, rate: float) -> None:
    """As if so much had left while sockets were full."""
    pacer.link.drained = rate
    pacer.link.speed = pacer.link.floor = min(pacer.link.known or rate, rate)


class Steady(Pacer):
    """A path to rank 1 whose echoes come ``step`` ns apart; ``rate`` is its limit, if there is one."""

    def __init__(self, step: int = 5 * MS, rate: float = 0.0, speed: float = SPEED) -> None:
        super().__init__(range(PEERS), speed=speed)
        self.path, self._now, self._step = self.paths[1], 0, step
        if rate:
            self.hold_to(1, rate)

    def take(self, rtt: int, marked: float = 0.0) -> float:
        self._now += self._step
        core().fast.tb_echoed(ctypes.byref(self.path), ctypes.byref(self.link), rtt, marked, self._now)
        return self.rate(1)


#: Round trips, ms, of a path that has a rate or none, and the rate after the last of them.
ROUND_TRIPS: dict[str, tuple[float, list[float], float]] = {
    "short ones add": (5e7, [8], 5.5e7),
    "nothing is above the speed of the link": (0, [8], SPEED),
    "three long ones multiply down in proportion": (5e7, [32] * 3, 5e7 * (1 - 0.8 * 0.75)),
    "those of a free path, too": (0, [32] * 3, SPEED * (1 - 0.8 * 0.75)),
    "two do not": (5e7, [32] * 2, 5e7),
    "nor do those with a short one between": (5e7, [32, 32, 8, 32, 32], 5.5e7),
    "down to half of an equal share": (5e7, [80] * 201, LEAST),
    "a queue that drains already is left alone": (5e7, [40, 40, 40, 35, 30, 25, 20, 15, 10], 5e7 * (1 - 0.8 * 0.8)),
}


@pytest.mark.parametrize(("rate", "round_trips", "found"), ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_what_round_trips_make_of_a_rate(rate: float, round_trips: list[float], found: float) -> None:
    path = Steady(rate=rate)
    assert [path.take(int(rtt * MS)) for rtt in round_trips][-1] == pytest.approx(found)


def test_raises_have_a_pause_and_end_the_limit() -> None:
    path = Steady(MS, 5e7)
    assert len({path.take(100_000) for _ in range(8)}) <= 3
    assert path.path.limited
    path.hold_to(1, SPEED / 1.09)
    assert ([path.take(MS) for _ in range(5)][-1], path.path.limited) == (SPEED, 0)


def test_a_limited_rank_has_one_quantum_at_once(bound: UdpSocket) -> None:
    """2e8 bytes a second, bursts of 8192 bytes: twelve of them, one more, and a wait until that is paid for."""
    pacer = Pacer([1, 2, 3])
    pacer.hold_to(1, 2e8)
    line = Line([bound], pacer)
    line.submit(7, C, (1, 64 * 20), (2, 64 * 20), now=SECOND)
    assert [line.taken.count((rank, 64)) for rank in (1, 2)] == [13, 20]
    assert line.queue.again == SECOND - pacer.link.quantum + 13 * 64 * STRIDE * 5


#: Packets of a burst at 100 Mbit/s, and ns that one takes.
BURST, TAKES = 48, 48 * (STRIDE + 42) * 80


@pytest.mark.parametrize("drained", [1.25e7, 1.25e6])
def test_all_ranks_together_have_the_speed_of_the_link(bound: UdpSocket, drained: float) -> None:
    """2 ms of it at once, then more when half of that has left. A busy host drains less than its link could."""
    pacer = Pacer([1, 2, 3], speed=1.25e7, most=1.25e7)
    slow_down(pacer, drained)
    line = Line([bound], pacer)
    line.submit(7, C, (1, BURST * 4), (2, BURST * 4), now=SECOND)
    assert line.taken == [(1, BURST), (2, BURST)] * 2
    assert line.queue.again == SECOND - 2 * MS + 4 * TAKES + MS
    line.go(line.queue.again - 1)
    assert len(line.taken) == 4
    line.go(line.queue.again)
    assert len(line.taken) == 6


def test_who_is_late_for_what_waited_makes_up_for_it_once(bound: UdpSocket) -> None:
    """Held, and looked at 100 ms late: 8 ms of the link may leave the next time, and 2 ms again after that."""
    line = Line([bound], Pacer([1, 2, 3], speed=1.25e7, most=1.25e7))
    line.submit(7, C, (1, BURST * 17), now=SECOND)
    assert len(line.taken) == 4
    line.go(SECOND + 100 * MS)
    assert len(line.taken) == 4 + 13
    line.submit(8, C, (1, BURST * 17), now=SECOND + 200 * MS)
    assert len(line.taken) == 4 + 13 + 4


def test_the_first_marks_count_in_full_and_later_ones_are_smoothed() -> None:
    path = Steady()
    assert path.take(MS, 0.4) == pytest.approx(SPEED * 0.8)
    assert path.path.marked == 0.4
    assert path.take(MS, 0.8) == pytest.approx(SPEED * 0.8 * (1 - 0.5 / 2))
    assert [path.take(MS, 1.0) for _ in range(50)][-1] == LEAST
    assert path.path.slowed > 2


def test_while_marks_come_every_rate_rises_by_the_same() -> None:
    raised = []
    for rate in (2e7, 8e7):
        path = Steady()
        path.take(MS, 0.4)
        path.hold_to(1, rate)
        raised.append(path.take(MS) - rate)
    assert raised == [0.05 * SPEED / PEERS] * 2


def test_the_lower_rate_holds() -> None:
    """Of an echo with marks after two long round trips; old marks alone lower nothing."""
    found = []
    for rtt, marked in ((9 * MS, 0.4), (4 * TARGET, 0.4), (4 * TARGET, 0.0)):
        path = Steady()
        path.path.marked = 0.4
        path.hold_to(1, 1e8)
        found.append([path.take(*echo) for echo in ((9 * MS, 0.0), (9 * MS, 0.0), (rtt, marked))][-1])
    smoothed = 0.4 * 0.75**2 * 0.75 + 0.4 * 0.25
    assert found == [pytest.approx(1e8 * (1 - smoothed / 2)), *[pytest.approx(1e8 * (1 - 0.8 * 0.75))] * 2]


@pytest.mark.parametrize(
    ("speed", "drained", "known"), [(0, 0, 1.25e8), (0, 2e7, 2e7), (0, 5e8, 5e8), (1e9, 0, 1e9), (1e9, 2e7, 2e7)]
)
def test_where_nobody_knows_the_speed_rates_fall_as_on_a_slow_link(speed: float, drained: float, known: float) -> None:
    path = Steady(speed=speed)
    if drained:
        slow_down(path, drained)
    assert [path.take(MS, 1.0) for _ in range(200)][-1] == known / PEERS / 2


def test_a_limit_follows_a_link_that_turns_out_slower() -> None:
    path = Steady(rate=5e7)
    slow_down(path, 2e7)
    assert (path.path.limited, path.rate(1), path.rate(2)) == (1, 2e7, 2e7)
    assert path.take(MS, 1.0) == 2e7 * (1 - 0.25 / 2)


def test_what_was_handed_over_waits_in_own_queues_by_the_speed_of_the_link(bound: UdpSocket) -> None:
    pacer = Pacer([1, 2, 3], speed=1e8, room=1 << 20)
    line = Line([bound], pacer)
    assert pacer.link.leaves == 0
    line.submit(7, C, (1, 100))  # frames of 170 bytes
    assert pacer.link.leaves == 170_000
    line.submit(8, C, (1, 64 * 128), now=MS)
    assert pacer.link.leaves == MS + (1 << 20) * 10  # no more than there is room for
    slow_down(pacer, 5e7)
    line.kernel.always = errno.EAGAIN  # whatever was reckoned: the socket is full
    for now in (SECOND, SECOND + MS):
        line.submit(9, C, (1, 1), now=now)
        assert pacer.link.leaves == now + bound.room() * 20


def test_a_driver_that_says_10_mbit_s_is_not_believed(bound: UdpSocket) -> None:
    """Every burst was one packet then. A user's word is taken."""
    for link, most, packets, pace in ((1.25e6, 0, 44, 1.25e6), (1.25e7, 0, 4, 1.25e7), (1.25e6, 1.25e6, 1, 1.25e6)):
        line = Line([bound], Pacer([1, 2, 3], speed=link, most=most)).queue
        assert (line.pacer.largest(1472), core().fast.tb_pace(line.line)) == (packets, pace)
        line.pacer.link.drained = 1e6
        assert core().fast.tb_pace(line.line) == 1e6
    assert core().fast.tb_pace(Line([bound]).queue.line) == 1.25e8


def test_what_leaves_while_sockets_are_full_is_measured(bound: UdpSocket) -> None:
    clock = [5]
    line = Line([bound], clock=lambda: clock[0])

    def drained(rows: int, took: int) -> float:
        """After a run over a socket that is full at once and takes all ``took`` ns later."""
        line.kernel.script = [errno.EAGAIN] if took else []
        line.submit(7, C, (1, rows))
        clock[0] += took
        line.queue.pump(1)
        return line.queue.pacer.link.drained

    rows = 1_000_000 // STRIDE
    assert [drained(6400, 0), drained(64, MS)] == [0, 0]  # nothing had to wait, and too little to say
    assert drained(rows, 8 * MS) == pytest.approx(1.25e8, rel=0.01)
    assert [drained(rows, 16 * MS) for _ in range(40)][-1] == pytest.approx(6.25e7, rel=0.01)


def test_a_link_that_is_never_free_is_measured_too(bound: UdpSocket) -> None:
    clock = [5]
    line = Line([bound], clock=lambda: clock[0])
    line.submit(7, C, (1, 64 * 400))
    while not line.queue.empty:
        line.kernel.script = [-4, errno.EAGAIN]
        clock[0] += MS
        line.queue.pump(1)
    assert line.queue.pacer.link.drained == pytest.approx(4 * 64 * STRIDE * 1e3, rel=0.2)


#: Bytes for a rank between two probes, packets of that, and ns after which a probe counts as lost.
EVERY, WHOLE, LOST = 192 << 10, (192 << 10) // STRIDE, 100 * MS


class Probed:
    """A line over a link without end, and what the peers of its probes tell its rank."""

    def __init__(self, sock: UdpSocket, ways: int = 1, keys: KeyRing | None = None) -> None:
        self.now, told, pacer = 0, Told(keys), Pacer((1, 2, 3), speed=1e15)
        self.told, self.states = told, told.states
        self.line = Line([sock], pacer, clock=lambda: self.now + 1, voice=told.voice, ways=ways)
        self.path, self.link, self.probes = pacer.paths[1], pacer.link, self.line.kernel.probes

    def burst(self, now: int, packets: int) -> bool:
        """So many leave for rank 1; whether a probe does."""
        self.now, before = now, len(self.probes)
        self.line.submit(7, C, (1, packets), now=now)
        return len(self.probes) > before

    def tell(self, now: int, rtt: int, marks: int = 0) -> tuple[int, float] | None:
        """An echo of rank 1: its round trip, and the share of packets with marks; None: it is none."""
        self.states["rtt_ns"][1], self.states["told"][1] = rtt, marks
        self.line.queue.pump(now)
        path, path.limited = self.path, 0  # so that marks count in full
        return None if path.awaited else (path.rtt, path.marked)


@pytest.fixture
def probed(bound: UdpSocket) -> Probed:
    return Probed(bound)


@pytest.mark.parametrize("ways", [1, 2])
def test_the_wait_in_own_queues_is_no_part_of_a_round_trip_and_no_loss(bound: UdpSocket, ways: int) -> None:
    """A thread's echo waits behind its own rank's rows, as the probe did here: twice."""
    probed = Probed(bound, ways)
    for start, rtt, found in ((0, 30 * MS, 30 * MS - ways * 9 * MS), (100 * MS, 5 * MS, 1)):
        probed.link.leaves = start + 9 * MS + 1
        assert probed.burst(start, WHOLE)
        assert probed.tell(start + 40 * MS, rtt) == (found, 0.0)
    probed.link.leaves = 200 * MS + 9 * MS + 1
    assert probed.burst(200 * MS, WHOLE)
    assert not probed.burst(300 * MS + ways * 9 * MS, WHOLE)
    assert probed.burst(300 * MS + ways * 9 * MS + 1, 1)


def test_a_lost_one_is_given_up_and_its_late_echo_is_not_taken_for_the_next(probed: Probed) -> None:
    """The next echo tells the marks of both intervals."""
    assert probed.burst(0, 10)
    assert probed.tell(MS + 1, MS) == (MS, 0.0)
    assert not probed.burst(2 * MS, WHOLE - 1)
    assert probed.burst(2 * MS, 1)
    assert not probed.burst(LOST + 2 * MS, WHOLE)
    assert probed.burst(LOST + 2 * MS + 1, 1)
    assert probed.path.missed == 1
    start = LOST + 2 * MS + 2
    assert probed.tell(start + LOST, LOST + 1) is None  # it is of the one before
    marks, packets = 100, WHOLE + 1 + WHOLE + 1
    assert probed.tell(start + LOST, 2 * MS, marks) == (2 * MS, marks / (packets + 1))
    assert (probed.path.missed, probed.line.queue.said.probes, probed.line.queue.said.echoes) == (0, 3, 2)
    probed.line.queue.pacer.hold_to(1, 1e15)
    assert probed.burst(start + LOST, 1), "it is limited"


def test_an_echo_says_how_many_packets_were_marked(probed: Probed) -> None:
    """The first says where its count begins. A peer that comes back counts from 0."""
    shares = []
    for i, told in enumerate((0xFFFFFFF0, 0xFFFFFFF0, 300, 9000, 9000, 0, 461)):
        now = 10 * MS * i
        assert probed.burst(now, WHOLE)
        echo = probed.tell(now + 2 * MS, MS + i, told)
        assert echo is not None
        shares.append(round(echo[1] * (WHOLE + 1)))
    assert shares == [0, 0, 316, WHOLE + 1, 0, 0, 461]
    assert probed.line.queue.said.marked == 316 + 8700 + 461


def test_a_probe_carries_its_time_and_proof(bound: UdpSocket) -> None:
    """Its time is that at which it is handed over."""
    for keys in (None, KeyRing(bytes(32), COOKIE, STRIDE - HEADER_BYTES)):
        probed = Probed(bound, keys=keys)
        assert probed.burst(40, 1)
        ((rank, packet),) = probed.probes
        parsed = parse(packet, keys.both if keys else ())
        assert parsed is not None
        head, body = parsed
        fields = ("type", "cookie", "sender", "owner")
        assert (rank, [int(head[name][0]) for name in fields]) == (1, [PacketType.PROBE, COOKIE, 0, 1])
        assert int.from_bytes(body[:8], "big") == 41


def test_a_probe_waits_for_room_and_is_lost_where_it_is_refused(probed: Probed) -> None:
    queue, kernel, counts = probed.line.queue, probed.line.kernel, probed.line.sender.counts[1]
    kernel.script = [0, errno.EAGAIN]
    assert not probed.burst(0, 1)
    assert (queue.empty, queue.full, probed.line.gone, counts.waits) == (False, 1, 1, 1)
    probed.now = MS
    queue.pump(MS)
    assert (queue.empty, queue.full, queue.again, probed.path.sent) == (True, 0, 0, MS + 1)
    kernel.script = [0, errno.EPERM]
    probed.burst(probed.now + 2 * LOST, WHOLE)
    assert (len(probed.probes), counts.lost, probed.path.sent) == (1, 1, probed.now + 1)
    assert counts.errors == {"EPERM": 1}


def test_a_rate_whose_probes_are_lost_rises(probed: Probed) -> None:
    for i in range(1, 11):
        assert probed.burst(i * 2 * LOST, WHOLE)
        assert not probed.path.limited
    probed.line.queue.pacer.hold_to(1, 1e9)
    probed.path.missed, rates = 0, []
    for i in range(11, 22):
        assert probed.burst(i * 2 * LOST, 1)
        rates.append(probed.path.rate)
    assert rates[:7] == [1e9] * 7
    assert rates[7] > 1e9


def test_ranks_that_are_gone_have_no_share(probed: Probed) -> None:
    assert probed.link.peers == 3
    probed.told.terms.live[:] = bitmap((1, 3))
    probed.burst(0, 1)
    assert probed.link.peers == 2
