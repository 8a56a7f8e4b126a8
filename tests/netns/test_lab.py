"""A lab as ``docs/lab.md`` has it: separate, joined inside, with the queues, rates, losses and bursts asked for."""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroute2 import IPRoute

from support import await_that
from tailbound.errors import ConfigError
from tailbound.kernel import ethtool
from tailbound.settings.kinds import parse_rate
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.counters import InterfaceCounters
from tailbound_lab.lab.faults import Fault, end_settings
from tailbound_lab.lab.spec import Background, Burst, LabSpec, parse_background
from tailbound_lab.lab.topology import Link
from tailbound_lab.lab.traffic import Sender, schedule

pytestmark = pytest.mark.needs("root", "netns")

Make = Callable[..., Cluster]
Datagrams = Callable[..., socket.socket]
UDP_SEGMENT = 103
#: Ethernet, IPv4 and UDP around a datagram of 1472 bytes
FULL_FRAME = 1514


@pytest.fixture(scope="module", params=[False, True], ids=["without cables", "with cables"])
def lab(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three workers; tests leave it as they find it."""
    with Cluster(LabSpec(workers=3, cables=request.param)) as made:
        yield made


def counters_of(lab: Cluster, place: tuple[str, str]) -> InterfaceCounters:
    return next(c for c in lab.drops() if (c.namespace, c.interface) == place)


def send_burst(sender: socket.socket, to: tuple[str, int], segments: int) -> None:
    """One UDP GSO send of full segments."""
    sender.sendmsg([bytes(1472 * segments)], [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", 1472))], 0, to)


# -- the network -------------------------------------------------------------------------------------------------------


def look() -> tuple[set[tuple[str, int]], set[str], list[str]]:
    """Routes, interfaces and addresses of IPv6 of this namespace."""
    with IPRoute() as ip:
        routes = {(r.get_attr("RTA_DST"), r["dst_len"]) for r in ip.get_routes(family=socket.AF_INET, table=254)}
        names = {link.get_attr("IFLA_IFNAME") for link in ip.get_links()}
        return routes, names, [a.get_attr("IFA_ADDRESS") for a in ip.get_addr(family=socket.AF_INET6)]


def test_nothing_leads_out_of_a_lab_and_every_end_has_a_queue_for_each_processor(lab: Cluster) -> None:
    for worker in lab.workers:
        assert lab.run(worker.rank, look) == ({("198.18.0.0", 16), ("198.19.0.0", 16)}, {"lo", "data0", "plain0"}, [])
    for namespace in (lab.topology.switch, *lab.topology.cables):
        assert namespaces.call(namespace, look)[0] == set()
    places = lab.drops()
    assert len(places) == (24 if lab.topology.cables else 12)
    for place in places:
        assert namespaces.call(place.namespace, ethtool.channels, place.interface)[:2] == (os.cpu_count(),) * 2


def test_all_reach_each_other_and_see_no_frames_of_others(lab: Cluster, datagram_socket: Datagrams) -> None:
    def packet_socket() -> socket.socket:
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
        tap.settimeout(20)
        tap.bind(("data0", 0x0800))
        return tap

    for link in Link:
        places = [(worker.address_on(link), 5000) for worker in lab.workers]
        sockets = [datagram_socket(lab, rank, link, 5000) for rank in range(3)]
        for sender, to in itertools.permutations(range(3), 2):
            sockets[sender].sendto(f"{sender} to {to}".encode(), places[to])
        for to in range(3):
            came = {sockets[to].recvfrom(100) for _ in range(2)}
            assert came == {(f"{sender} to {to}".encode(), places[sender]) for sender in range(3) if sender != to}
    with lab.run(2, packet_socket) as tap:
        for to in (1, 2):
            datagram_socket(lab, 0).sendto(f"for {to}".encode(), (lab.workers[to].address, 5000))
        frame, (_, _, kind, _, _) = tap.recvfrom(2048)
    assert (frame[42:], kind) == (b"for 2", socket.PACKET_HOST)


@pytest.mark.parametrize("rate", [None, 10**10])
@pytest.mark.parametrize("wire", [False, True])
def test_super_frames_stay_whole_only_without_wire(
    tailbound_lab: Make, datagram_socket: Datagrams, wire: bool, rate: int | None
) -> None:
    """Checksum offload stays on, or UDP GSO would be refused, and TCP would pay for what no NIC makes it compute."""
    lab = tailbound_lab(workers=2, wire=wire, rate=rate)
    for link in Link:
        sender, receiver = datagram_socket(lab, 0, link), datagram_socket(lab, 1, link, 5000)
        send_burst(sender, (lab.workers[1].address_on(link), 5000), 40)
        for _ in range(40):
            assert len(receiver.recv(65536)) == 1472
        frames = counters_of(lab, (lab.workers[1].namespace, link.interface)).rx_packets
        assert frames == (40 if wire else 1)
        there = lab.topology
        for rank in range(2):
            far = there.cable_ends(rank, link)[0] if there.cables else (there.switch, link.port(rank))
            counters = counters_of(lab, far)
            assert max(counters.rx_packets, counters.tx_packets) == frames
            assert not wire or max(counters.rx_bytes, counters.tx_bytes) <= 40 * FULL_FRAME
        assert lab.run(0, ethtool.features, link.interface)[ethtool.TX_CHECKSUM]
    assert lab.lost_frames() == 0


@pytest.mark.needs("veth backpressure")
def test_a_ring_never_drops_while_its_queue_can_hold_the_frames(
    tailbound_lab: Make, datagram_socket: Datagrams
) -> None:
    """A veth ring holds 256 frames; 20 bursts of 44 wait in the queue before it."""
    lab = tailbound_lab(workers=2, wire=True)
    sender, place = datagram_socket(lab, 0), (lab.workers[1].namespace, "data0")
    for _ in range(20):
        send_burst(sender, (lab.workers[1].address, 5000), 44)
    await_that(lambda: counters_of(lab, place).rx_packets == 880 or lab.lost_frames(), "all frames come or are lost")
    assert lab.lost_frames() == 0


# -- rates -------------------------------------------------------------------------------------------------------------


def test_rates_hold_both_ways_and_can_be_changed(tailbound_lab: Make, datagram_socket: Datagrams) -> None:
    lab = tailbound_lab(workers=2, rate=10**9)

    def look() -> list[tuple[str, int]]:
        with IPRoute() as ip:
            return [
                (link.get_attr("IFLA_IFNAME"), q.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"])
                for link in ip.get_links()
                for q in ip.get_qdiscs(link["index"])
                if q.get_attr("TCA_KIND") == "tbf"
            ]

    def rates() -> dict[tuple[str, str], int]:
        """By the place of each tbf of the lab, in bytes/s."""
        return {(name, end): rate for name in lab.topology.namespaces for end, rate in namespaces.call(name, look)}

    def kept(rank: int, link: Link) -> set[tuple[str, str]]:
        """Where a worker's rate is kept: on its own interface, and at the cable's end towards it."""
        return {(lab.workers[rank].namespace, link.interface), lab.topology.cable_ends(rank, link)[0]}

    ends, slow = {end for rank in range(2) for link in Link for end in kept(rank, link)}, kept(1, Link.DATA)
    assert rates() == dict.fromkeys(ends, 125_000_000)
    lab.set_rate(1, 50_000_000, Link.DATA)
    assert rates() == {end: 6_250_000 if end in slow else 125_000_000 for end in ends}
    lab.set_rate(1, None, Link.DATA)
    assert rates() == dict.fromkeys(ends - slow, 125_000_000)
    receiver = datagram_socket(lab, 1, Link.DATA, 5000)
    datagram_socket(lab, 0).sendto(b"still there", (lab.workers[1].address, 5000))
    assert receiver.recv(100) == b"still there"


def test_a_slow_cable_passes_its_burst_holds_its_buffer_and_drops_the_rest(
    tailbound_lab: Make, datagram_socket: Datagrams
) -> None:
    """In bytes: 10 kB/s is nothing against what a burst and the buffer hold, however long the test takes."""
    lab = tailbound_lab(workers=2, cables=True)
    lab.set_rate(1, 80_000)
    sender = datagram_socket(lab, 0)
    sender.setsockopt(socket.SOL_SOCKET, 32, 16 << 20)  # SO_SNDBUFFORCE: packets in the buffer are the sender's
    frames = 700
    for _ in range(frames // 35):
        send_burst(sender, (lab.workers[1].address, 5000), 35)
    end = counters_of(lab, lab.topology.cable_ends(1, Link.DATA)[0])
    kept = frames - end.qdisc
    assert 66_000 + 256 * 1024 - 2 * FULL_FRAME <= kept * FULL_FRAME <= 2 * (66_000 + 256 * 1024)
    assert end.tx_bytes <= 150_000
    assert lab.lost_frames() == end.qdisc > 0


# -- losses, duplicates, damage ----------------------------------------------------------------------------------------

PROBABILITIES = st.floats(0, 0.7)
PACKETS = 1500
in_a_lab = pytest.mark.needs("bpf", "bcc", "headers")


@given(loss=PROBABILITIES, duplicate=PROBABILITIES, corrupt=PROBABILITIES, length=st.floats(2, 1000))
def test_two_ends_together_do_what_was_asked_for(loss: float, duplicate: float, corrupt: float, length: float) -> None:
    def both(probability: float) -> float:
        return 1 - (1 - probability) ** 2

    alone = end_settings(Fault(loss=loss, duplicate=duplicate, corrupt=corrupt))
    assert [both(alone.loss_good), both(alone.duplicate), both(alone.corrupt)] == pytest.approx(
        [loss, duplicate, corrupt], abs=1e-12
    )
    assert (alone.to_bad, alone.to_good) == (0, 0)
    bursts = end_settings(Fault(burst=Burst(max(loss, 1e-6), length)))
    assert both(bursts.to_bad / (bursts.to_bad + bursts.to_good)) == pytest.approx(max(loss, 1e-6))
    assert (1 / bursts.to_good, bursts.loss_good, bursts.loss_bad) == (pytest.approx(length), 0, 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": 1.0}, "loss"), ({"loss": -0.1}, "loss"), ({"duplicate": 2.0}, "duplicate"),
        ({"corrupt": math.nan}, "corrupt"), ({"burst": Burst(0.9, 1)}, "make them longer"),
    ],
)  # fmt: skip
def test_a_fault_that_cannot_be_is_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Fault(**settings)


@pytest.fixture
def exchange(datagram_socket: Datagrams) -> Callable[..., list[int]]:
    """``(lab, link)`` -> numbers of the datagrams that came, of PACKETS sent from worker 0 to worker 1."""

    def go(lab: Cluster, link: Link = Link.DATA) -> list[int]:
        receiver, sender = datagram_socket(lab, 1, link), datagram_socket(lab, 0, link)
        receiver.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)  # SO_RCVBUFFORCE
        for i in range(PACKETS):
            sender.sendto(i.to_bytes(4) + bytes(60), receiver.getsockname())
        # what follows without faults comes last: one way, one queue, in order
        lab.set_faults(Fault(), link=link)
        sender.sendto(b"end", receiver.getsockname())
        came = []
        while (data := receiver.recv(2048)) != b"end":
            came.append(int.from_bytes(data[:4]) if data[4:] == bytes(60) else -1)
        return came

    return go


@in_a_lab
def test_counters_explain_every_packet(tailbound_lab: Make, exchange: Callable[..., list[int]]) -> None:
    lab = tailbound_lab(workers=2, cables=True)
    for link in Link:
        before = lab.fault_counts(link=link)
        lab.set_faults(Fault(loss=0.1, burst=Burst(0.1, 4), duplicate=0.2), link=link)
        came = exchange(lab, link)
        counts = lab.fault_counts(link=link)
        lost, doubled = counts.lost - before.lost, counts.duplicated - before.duplicated
        assert len(came) == PACKETS - lost + doubled
        assert min(lost, doubled) > 100
        assert len(set(came)) < len(came)
        assert sorted(came) == came, "duplicates come side by side"
    assert lab.fault_counts() == lab.fault_counts(0) + lab.fault_counts(1)
    assert lab.fault_counts() == lab.fault_counts(link=Link.DATA) + lab.fault_counts(link=Link.PLAIN)
    assert lab.lost_frames() == 0


@in_a_lab
def test_a_seed_gives_the_same_fates_in_every_lab(tailbound_lab: Make, exchange: Callable[..., list[int]]) -> None:
    def fates(seed: int) -> list[int]:
        lab = tailbound_lab(workers=2, loss=0.1, burst=Burst(0.1), duplicate=0.1, corrupt=0.1, seed=seed)
        came = exchange(lab)
        lab.close()
        return came

    first = fates(1)
    assert first == fates(1) != fates(2)


@in_a_lab
def test_a_flipped_bit_is_noticed_and_never_delivered(tailbound_lab: Make, exchange: Callable[..., list[int]]) -> None:
    lab = tailbound_lab(workers=2, corrupt=0.3)
    came, corrupted = exchange(lab), lab.fault_counts(link=Link.DATA).corrupted
    refused = PACKETS - len(came)
    assert -1 not in came
    assert 0.8 * corrupted < refused <= corrupted  # one that is hit at both ends counts twice
    assert 0.25 * PACKETS < refused < 0.35 * PACKETS


# -- foreign traffic ---------------------------------------------------------------------------------------------------

BACKGROUND = Background(800_000_000, 50.0, 450.0)


def test_a_background_is_read_and_written_and_what_cannot_be_is_refused() -> None:
    assert parse_background("800mbit:50:450") == parse_background(str(BACKGROUND)) == BACKGROUND
    wrong = "1gbit", "1gbit:10", "fast:10:10", "1gbit:x:10", "1gbit:0:10", "1gbit:10:0", "100gbit:1:1", "1gbit:1:1:1"
    for text in wrong:
        with pytest.raises(ConfigError, match=r"back|rate"):
            parse_background(text)


def test_bursts_follow_seed_and_rank_and_have_the_means_asked_for() -> None:
    def bursts(seed: int, rank: int) -> list[tuple[float, float]]:
        return list(itertools.islice(schedule(BACKGROUND, seed, rank), 2000))

    one = bursts(1, 0)
    assert one == bursts(1, 0) != bursts(2, 0)
    assert one != bursts(1, 1)
    lengths = [length for _, length in one]
    assert 0.04 <= min(lengths) < max(lengths) <= 0.06
    assert sum(lengths) / one[-1][0] == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("size", [548, 1400])
def test_bursts_have_their_rate_and_nothing_is_sent_between_them(size: int) -> None:
    sender, seconds, step = Sender(BACKGROUND, 3, 2, size), 20.0, 1e-4
    sent = [(i * step, rank) for i in range(int(seconds / step)) for rank in sender.take(i * step)]
    for rank in range(2):
        inside = list(itertools.takewhile(lambda b: b[0] < seconds, schedule(BACKGROUND, 3, rank)))
        at = [now for now, r in sent if r == rank]
        assert all(any(a <= now <= a + length + step for a, length in inside) for now in at)
        bits = len(at) * sender.packets * 8 * (size + 42)
        assert bits == pytest.approx(sum(length for _, length in inside) * BACKGROUND.rate, rel=0.05)


def test_bursts_take_the_place_of_others_in_a_cable(tailbound_lab: Make, datagram_socket: Datagrams) -> None:
    """The queue before worker 1 overflows on both links; nobody answers the background, and others pass after it."""
    busy = Background(200_000_000, 5000.0, 1.0)
    lab = tailbound_lab(workers=2, rate=parse_rate("50mbit"), background=busy, seed=5)

    def counters() -> dict[tuple[str, str], InterfaceCounters]:
        return {(c.namespace.rpartition("-")[2], c.interface): c for c in lab.drops()}

    await_that(lambda: all(counters()["c1", link.worker_port].qdisc for link in Link), "full queues")
    lab.set_background(None)
    for link in Link:
        receiver, sender = datagram_socket(lab, 1, link), datagram_socket(lab, 0, link)
        sender.sendto(b"x", receiver.getsockname())
        assert receiver.recv(2000) == b"x"
        of_background = counters()["b", link.interface]
        assert of_background.rx_packets == 0
        assert of_background.tx_bytes > 1_000_000


# -- commands, and what is refused -------------------------------------------------------------------------------------


def test_commands_see_their_own_interfaces_and_everything_else_of_sys(tailbound_lab: Make) -> None:
    lab = tailbound_lab(workers=2)
    script = "ls /sys/class/net; cat /sys/class/net/data0/address; cat /etc/hosts; cut -d' ' -f2 /proc/mounts"
    process = lab.popen(1, ["sh", "-c", script], stdout=-1, text=True)
    lines = process.communicate()[0].splitlines()
    assert process.returncode == 0
    assert lines[:4] == ["data0", "lo", "plain0", lab.workers[1].mac]
    assert {"198.19.0.2 worker1", "198.18.0.1 worker0-data"} < set(lines)
    mounted = (line.split()[1] for line in Path("/proc/mounts").read_text().splitlines())
    assert {place for place in mounted if place.startswith("/sys/")} <= set(lines)


def test_a_lab_says_what_it_cannot_do(tailbound_lab: Make) -> None:
    lab = tailbound_lab(workers=2)
    for call in (lambda: lab.set_rate(0, 10**6), lambda: lab.set_faults(Fault(loss=0.5))):
        with pytest.raises(ConfigError, match="cables=True"):
            call()
    for call in (lambda: lab.run(-1, os.getpid), lambda: lab.set_link(2, up=False)):
        with pytest.raises(ConfigError, match=r"ranks are 0\.\.1"):
            call()
