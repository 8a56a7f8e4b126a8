"""Fan-out seen from the peers' plain UDP sockets: who gets what, with which checksum, and what is counted."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from pyroute2 import IPRoute

from left_behind import nothing_more
from tailbound.kernel import ethtool
from tailbound.kernel.fanout import Fanout
from tailbound.transport.sockets import reserve
from tailbound.wire import packets
from tailbound.wire.schema import PacketType
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import LabSpec
from tailbound_lab.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers", "tcx")

SocketOf = Callable[..., socket.socket]
WORKERS, OWN, PORT, SEGMENT = 5, 1, 7400, 1472
GOODBYE = b"goodbye"
_UDP_SEGMENT = 103


@dataclass
class Team:
    """Worker ``OWN`` with fan-out, the others with plain sockets; all in one thread, so nothing happens unseen."""

    lab: Cluster
    out: socket.socket  #: what bursts leave by
    plain: socket.socket  #: another socket of the same worker
    peers: dict[int, socket.socket]
    fanout: Fanout
    places: dict[int, tuple[str, int]] = field(default_factory=dict)

    def send(self, payload: bytes, to: int | None = None, segment: int = 0) -> None:
        """One system call, to the lead unless told otherwise."""
        rank = self.fanout.lead if to is None else to
        assert rank is not None
        control = [(socket.IPPROTO_UDP, _UDP_SEGMENT, struct.pack("=H", segment))] if segment else []
        assert self.out.sendmsg([payload], control, 0, self.places[rank]) == len(payload)

    def heard(self, rank: int) -> list[bytes]:
        """Everything that has come to a peer: up to a packet that takes the same way without fan-out."""
        self.plain.sendto(GOODBYE, self.places[rank])
        got = []
        while (data := self.peers[rank].recv(1 << 16)) != GOODBYE:
            got.append(data)
        return got

    def bad_checksums(self) -> int:
        """Datagrams that a stack refused for their checksum, all workers."""
        return sum(self.lab.run(rank, _bad_checksums) for rank in range(WORKERS))


def _bad_checksums() -> int:
    here = Path("/proc/thread-self/net")
    names, values = (line.split() for line in (here / "snmp").read_text().splitlines() if "Udp:" in line)
    ipv6 = dict(line.split() for line in (here / "snmp6").read_text().splitlines())
    return int(values[names.index("InCsumErrors")]) + int(ipv6["Udp6InCsumErrors"])


def pieces(payload: bytes, segment: int) -> list[bytes]:
    return [payload[at : at + segment] for at in range(0, len(payload), segment)]


def noise(length: int, seed: int = 7) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, length, np.uint8).tobytes()


@pytest.fixture(scope="module")
def own_lab() -> Iterator[Cluster]:
    """Tests leave it as they find it."""
    with nothing_more(), Cluster(LabSpec(workers=WORKERS)) as made:
        yield made


@pytest.fixture
def make_team(own_lab: Cluster, datagram_socket: SocketOf) -> Iterator[Callable[..., Team]]:
    """``(lab=...)`` -> a team in which every other worker is live."""
    with contextlib.ExitStack() as stack:

        def make(lab: Cluster = own_lab) -> Team:
            ranks = [rank for rank in range(WORKERS) if rank != OWN]
            peers = {rank: datagram_socket(lab, rank, port=PORT) for rank in ranks}
            for sock in peers.values():
                reserve(sock, socket.SO_RCVBUF, 64 << 20)
            out, plain = (datagram_socket(lab, OWN) for _ in range(2))
            interface = lab.workers[OWN].interface
            places = {rank: (lab.workers[rank].address, PORT) for rank in ranks}
            attach = partial(Fanout.attach, address=lab.workers[OWN].address)
            fanout = lab.run(OWN, attach, interface, out.getsockname()[1], PORT, "auto", 1, WORKERS - 1)
            stack.callback(fanout.close)
            fanout.set_peers(OWN, {rank: address for rank, (address, _) in places.items()})
            fanout.live(ranks)
            for rank, place in places.items():  # alone, which shows the program the way
                plain.sendto(packets.packet(packets.header(type=PacketType.PROBE, owner=rank), b""), place)
                peers[rank].recv(1 << 16)
            finished = Team(lab, out, plain, peers, fanout, places)
            stack.callback(finish, finished, "promised")
            return finished

        yield make


@pytest.fixture
def team(make_team: Callable[..., Team]) -> Team:
    return make_team()


def finish(team: Team, checksums: str) -> None:
    """Who computes checksums: nobody (they are only promised, as on every veth), the sender's stack, or the switch."""
    data = Link.DATA
    team.lab.run(OWN, ethtool.set_features, data.interface, checksums != "sender", ethtool.CHECKSUMS)
    for rank in range(WORKERS):
        left = checksums != "switch", ethtool.CHECKSUMS
        namespaces.call(team.lab.topology.switch, ethtool.set_features, data.port(rank), *left)


def test_every_peer_gets_every_segment(make_team: Callable[..., Team]) -> None:
    """Bursts of many segments, with a short one at the end, of one, and single packets, odd and even."""
    every_segment(make_team())


def test_every_peer_gets_every_segment_over_ipv6(
    tailbound_lab: Callable[..., Cluster], make_team: Callable[..., Team]
) -> None:
    """Where a checksum of 0 is none at all, and a stack that gets one drops the packet."""
    every_segment(make_team(lab=tailbound_lab(workers=WORKERS, ipv6=True)))


def every_segment(team: Team) -> None:
    sent, bad = list[bytes](), team.bad_checksums()
    full = SEGMENT - 20 * (":" in team.places[0][0])
    lengths = [(44 * full, full), (44 * full - 700, full), (65487, 1000), (2 * 64, 64), (full, 0), (333, 0), (1, 0)]
    words = np.arange(0, 1 << 16, 7, dtype=">u2").tobytes()  # some of whose sums are 0
    for seed, checksums in enumerate(("promised", "sender", "switch")):
        finish(team, checksums)
        bursts = [(noise(length, seed), segment) for length, segment in lengths]
        for payload, segment in [*bursts, *((words[at : at + 80], 4) for at in range(0, len(words), 80))]:
            team.send(payload, segment=segment)
            sent += pieces(payload, segment or len(payload))
    for rank in team.peers:
        assert team.heard(rank) == sent, rank
    assert team.bad_checksums() == bad
    every = 3 * (len(lengths) + -(-len(words) // 80))
    assert team.fanout.counts() == {0: (every, 0, 0, 0, 0)} | dict.fromkeys((2, 3, 4), (0, every, 0, len(sent), 0))


def test_copies_that_do_not_leave_are_counted(team: Team) -> None:
    """A queue that takes nothing refuses every copy; the send itself succeeds all the same (kernel-23)."""
    interface = team.lab.workers[OWN].interface
    team.send(b"before")
    team.lab.run(OWN, _queue, interface, 0)
    for _ in range(3):
        team.send(noise(4000), segment=1000)
    team.lab.run(OWN, _queue, interface, 1000)
    team.send(b"after")
    assert {rank: team.heard(rank) for rank in team.peers} == {rank: [b"before", b"after"] for rank in team.peers}
    assert team.fanout.counts() == {0: (5, 0, 0, 0, 0)} | dict.fromkeys((2, 3, 4), (0, 2, 3, 2, 12))


def _queue(interface: str, limit: int) -> None:
    """Lets at most ``limit`` packets wait in front of an interface of this namespace."""
    with IPRoute() as ip:
        ip.tc("replace", "pfifo", ip.link_lookup(ifname=interface)[0], root=True, handle="1:", limit=limit)
