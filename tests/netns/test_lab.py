"""A lab is what it says it is: connected inside, separate from everything else, with the queues and rates asked for."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from support import PATIENCE
from tailbound.errors import ConfigError
from tailbound.kernel import ethtool
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.counters import InterfaceCounters
from tailbound_lab.lab.faults import Fault, FaultCounts
from tailbound_lab.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns")

Make = Callable[..., Cluster]
Datagrams = Callable[..., socket.socket]
UDP_SEGMENT = 103
#: Ethernet, IPv4 and UDP around a datagram of 1472 bytes
FULL_FRAME = 1514


def veths(lab: Cluster) -> list[tuple[str, str]]:
    return [(c.namespace, c.interface) for c in lab.drops()]


def counters_of(lab: Cluster, place: tuple[str, str]) -> InterfaceCounters:
    return next(c for c in lab.drops() if (c.namespace, c.interface) == place)


def test_every_end_has_a_queue_for_each_processor(tailbound_lab: Make) -> None:
    lab, count = tailbound_lab(workers=2, rate=10**9), os.cpu_count()
    places = veths(lab)
    assert len(places) == (16 if lab.topology.cables else 8)
    for namespace, interface in places:
        assert namespaces.call(namespace, ethtool.channels, interface)[:2] == (count, count)


def test_nothing_leads_out_of_a_lab(tailbound_lab: Make) -> None:
    lab = tailbound_lab(workers=2, rate=10**9)

    def look() -> tuple[set[tuple[str, int]], set[str], list[str | None]]:
        with IPRoute() as ip:
            routes = {(r.get_attr("RTA_DST"), r["dst_len"]) for r in ip.get_routes(family=socket.AF_INET, table=254)}
            links = ip.get_links()
            return (
                routes,
                {n.get_attr("IFLA_IFNAME") for n in links},
                [
                    a.get_attr("IFA_ADDRESS")
                    for n in links
                    for a in ip.get_addr(index=n["index"], family=socket.AF_INET6)
                ],
            )

    for worker in lab.workers:
        routes, links, ipv6 = lab.run(worker.rank, look)
        assert routes == {("198.18.0.0", 16), ("198.19.0.0", 16)}
        assert links == {"lo", "data0", "plain0"}
        assert ipv6 == []
    for namespace in (lab.topology.switch, *lab.topology.cables):
        assert namespaces.call(namespace, look)[0] == set()

    def reach_out() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", ("192.0.2.1", 9))

    with pytest.raises(OSError, match="unreachable"):
        lab.run(0, reach_out)


def packet_socket(interface: str) -> socket.socket:
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
    tap.settimeout(20)
    tap.bind((interface, 0x0800))
    return tap


@pytest.mark.parametrize("cables", [False, True])
def test_all_reach_each_other_and_see_no_frames_of_others(
    tailbound_lab: Make, datagram_socket: Datagrams, cables: bool
) -> None:
    lab = tailbound_lab(workers=3, cables=cables)
    for link in Link:
        places = [(worker.address_on(link), 5000) for worker in lab.workers]
        sockets = [datagram_socket(lab, rank, link, 5000) for rank in range(3)]
        for sender, to in itertools.permutations(range(3), 2):
            sockets[sender].sendto(f"{sender} to {to}".encode(), places[to])
        for to in range(3):
            came = {sockets[to].recvfrom(100) for _ in range(2)}
            assert came == {(f"{sender} to {to}".encode(), places[sender]) for sender in range(3) if sender != to}
    with lab.run(2, packet_socket, "data0") as tap:
        sender = datagram_socket(lab, 0)
        for to in (1, 2):
            sender.sendto(f"for {to}".encode(), (lab.workers[to].address, 5000))
        frame, (_, _, kind, _, _) = tap.recvfrom(2048)
    assert (frame[42:], kind) == (b"for 2", socket.PACKET_HOST)


def send_burst(sender: socket.socket, to: tuple[str, int], segments: int) -> None:
    """One UDP GSO send of full segments."""
    sender.sendmsg([bytes(1472 * segments)], [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", 1472))], 0, to)


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
        far = [there.cable_ends(r, link)[0] if there.cables else (there.switch, link.port(r)) for r in range(2)]
        for place in far:
            there = counters_of(lab, place)
            assert max(there.rx_packets, there.tx_packets) == frames
            if wire:
                assert max(there.rx_bytes, there.tx_bytes) <= 40 * FULL_FRAME
        assert lab.run(0, ethtool.features, link.interface)[ethtool.TX_CHECKSUM]
    assert lab.lost_frames() == 0


@pytest.mark.needs("veth backpressure")
def test_a_ring_never_drops_while_its_queue_can_hold_the_frames(
    tailbound_lab: Make, datagram_socket: Datagrams
) -> None:
    """A veth ring holds 256 frames; 20 bursts of 45 wait in the queue before it."""
    lab = tailbound_lab(workers=2, wire=True)
    sender = datagram_socket(lab, 0)
    for _ in range(20):
        send_burst(sender, (lab.workers[1].address, 5000), 44)
    end = time.monotonic() + PATIENCE
    while True:
        arrived = counters_of(lab, (lab.workers[1].namespace, "data0"))
        if arrived.rx_packets + arrived.rx_dropped >= 880 or lab.lost_frames():
            break
        assert time.monotonic() < end, f"neither here nor lost: {arrived}"
    assert lab.lost_frames() == 0
    assert arrived.rx_packets == 880


def shapers(lab: Cluster) -> dict[tuple[str, str], int]:
    """Rate in bytes/s of every tbf of the lab."""

    def look() -> list[tuple[str, int]]:
        with IPRoute() as ip:
            return [
                (link.get_attr("IFLA_IFNAME"), q.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"])
                for link in ip.get_links()
                for q in ip.get_qdiscs(link["index"])
                if q.get_attr("TCA_KIND") == "tbf"
            ]

    return {(name, end): rate for name in lab.topology.namespaces for end, rate in namespaces.call(name, look)}


def shaped(lab: Cluster, rank: int, link: Link) -> set[tuple[str, str]]:
    """Where a worker's rate is kept: on its own interface, and at the cable's end towards it."""
    return {(lab.workers[rank].namespace, link.interface), lab.topology.cable_ends(rank, link)[0]}


def test_rates_hold_both_ways_and_can_be_changed(tailbound_lab: Make, datagram_socket: Datagrams) -> None:
    lab = tailbound_lab(workers=2, rate=10**9)
    ends = {end for rank in range(2) for link in Link for end in shaped(lab, rank, link)}
    assert shapers(lab) == dict.fromkeys(ends, 125_000_000)
    slow = shaped(lab, 1, Link.DATA)
    lab.set_rate(1, 50_000_000, Link.DATA)
    assert shapers(lab) == {end: 6_250_000 if end in slow else 125_000_000 for end in ends}
    lab.set_rate(1, None, Link.DATA)
    assert shapers(lab) == dict.fromkeys(ends - slow, 125_000_000)
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
    down = lab.topology.cable_ends(1, Link.DATA)[0]
    end = counters_of(lab, down)
    kept = frames - end.qdisc
    assert 66_000 + 256 * 1024 - 2 * FULL_FRAME <= kept * FULL_FRAME <= 2 * (66_000 + 256 * 1024)
    assert end.tx_bytes <= 150_000
    assert lab.lost_frames() == end.qdisc > 0


def test_commands_see_their_own_interfaces_and_everything_else_of_sys(tailbound_lab: Make) -> None:
    lab = tailbound_lab(workers=2)
    script = "ls /sys/class/net; cat /sys/class/net/data0/address; cat /etc/hosts; cut -d' ' -f2 /proc/mounts"
    process = lab.popen(1, ["sh", "-c", script], stdout=-1, text=True)
    lines = process.communicate()[0].splitlines()
    assert process.returncode == 0
    assert lines[:4] == ["data0", "lo", "plain0", lab.workers[1].mac]
    assert "198.19.0.2 worker1" in lines
    assert "198.18.0.1 worker0-data" in lines
    below_sys = {
        line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if line.split()[1].startswith("/sys/")
    }
    assert below_sys <= set(lines)


def test_what_a_lab_cannot_do_is_said(tailbound_lab: Make) -> None:
    lab = tailbound_lab(workers=2)
    with pytest.raises(ConfigError, match="cables=True"):
        lab.set_rate(0, 10**6)
    with pytest.raises(ConfigError, match="cables=True"):
        lab.set_faults(Fault(loss=0.5))
    assert lab.fault_counts() == FaultCounts()
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match=r"ranks are 0\.\.1"):
            lab.run(rank, os.getpid)
        with pytest.raises(ConfigError, match=r"ranks are 0\.\.1"):
            lab.set_link(rank, up=False)
