"""Fan-out seen from the peers' plain UDP sockets: who gets what, with which checksum, and what is counted."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from pyroute2 import IPRoute

import packed
from tailbound.kernel import ethtool
from tailbound.kernel.fanout import Fanout
from tailbound.transport.sockets import reserve
from tailbound.wire.schema import PacketType
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers", "tcx")

WORKERS, OWN, PORT, SEGMENT = 5, 1, 7400, 1472
_UDP_SEGMENT = 103


@dataclass
class Team:
    """Worker ``OWN`` with fan-out, the others with plain sockets; all in one thread, so nothing happens unseen."""

    lab: Cluster
    out: socket.socket  #: what bursts leave by
    plain: socket.socket  #: another socket of the same worker
    peers: dict[int, socket.socket]
    fanout: Fanout

    def place(self, rank: int) -> tuple[str, int]:
        return self.lab.workers[rank].address, PORT

    def send(self, payload: bytes, segment: int = 0) -> None:
        """One system call, to the lead."""
        assert self.fanout.lead is not None
        control = [(socket.IPPROTO_UDP, _UDP_SEGMENT, struct.pack("=H", segment))] if segment else []
        assert self.out.sendmsg([payload], control, 0, self.place(self.fanout.lead)) == len(payload)

    def heard(self, rank: int) -> list[bytes]:
        """Everything that has come to a peer: up to a packet that takes the same way without fan-out."""
        self.plain.sendto(b"goodbye", self.place(rank))
        got = []
        while (data := self.peers[rank].recv(1 << 16)) != b"goodbye":
            got.append(data)
        return got

    def checksums_are(self, made: str) -> None:
        """Who makes checksums: nobody (they are only promised, as on every veth), the sender's stack, or the switch."""
        self.lab.run(OWN, ethtool.set_features, Link.DATA.interface, made != "sender", ethtool.CHECKSUMS)
        for rank in range(WORKERS):
            change = ethtool.set_features, Link.DATA.port(rank), made != "switch", ethtool.CHECKSUMS
            namespaces.call(self.lab.topology.switch, *change)

    def bad_checksums(self) -> int:
        """Datagrams that a stack refused for their checksum, all workers."""

        def refused() -> int:
            here = Path("/proc/thread-self/net")
            names, values = (line.split() for line in (here / "snmp").read_text().splitlines() if "Udp:" in line)
            ipv6 = dict(line.split() for line in (here / "snmp6").read_text().splitlines())
            return int(values[names.index("InCsumErrors")]) + int(ipv6["Udp6InCsumErrors"])

        return sum(self.lab.run(rank, refused) for rank in range(WORKERS))


@pytest.fixture
def team(
    request: pytest.FixtureRequest, tailbound_lab: Callable[..., Cluster], datagram_socket: Callable[..., socket.socket]
) -> Iterator[Team]:
    """Every other worker is live; the parameter is whether they have IPv6."""
    lab = tailbound_lab(workers=WORKERS, ipv6=getattr(request, "param", False))
    peers = {rank: datagram_socket(lab, rank, port=PORT) for rank in range(WORKERS) if rank != OWN}
    for sock in peers.values():
        reserve(sock, socket.SO_RCVBUF, 64 << 20)
    out, plain = (datagram_socket(lab, OWN) for _ in range(2))
    attach = partial(Fanout.attach, address=lab.workers[OWN].address)
    where = lab.workers[OWN].interface, out.getsockname()[1], PORT, "auto"
    with contextlib.closing(lab.run(OWN, attach, *where)) as fanout:
        made = Team(lab, out, plain, peers, fanout)
        fanout.set_peers(OWN, {rank: lab.workers[rank].address for rank in peers})
        fanout.live(peers)
        for rank, peer in peers.items():  # alone, which shows the program the way
            plain.sendto(packed.packet(packed.header(type=PacketType.PROBE, owner=rank), b""), made.place(rank))
            peer.recv(1 << 16)
        yield made


@pytest.mark.parametrize("team", [False, True], ids=["IPv4", "IPv6"], indirect=True)
def test_every_peer_gets_every_segment(team: Team) -> None:
    """Bursts of many segments, with a short one at the end, of one, and single packets, odd and even.

    A checksum of 0 is none at all over IPv6, and a stack that gets one drops the packet.
    """
    full = SEGMENT - 20 * (":" in team.lab.workers[0].address)
    lengths = [(44 * full, full), (44 * full - 700, full), (65487, 1000), (2 * 64, 64), (full, 0), (333, 0), (1, 0)]
    words = np.arange(0, 1 << 16, 7, dtype=">u2").tobytes()  # some of whose sums are 0
    sent, sends, bad = list[bytes](), 0, team.bad_checksums()
    for seed, made in enumerate(("promised", "sender", "switch")):
        team.checksums_are(made)
        random = np.random.default_rng(seed)
        bursts = [(random.integers(0, 256, length, np.uint8).tobytes(), segment) for length, segment in lengths]
        for payload, segment in [*bursts, *((words[at : at + 80], 4) for at in range(0, len(words), 80))]:
            team.send(payload, segment)
            sends, step = sends + 1, segment or len(payload)
            sent += [payload[at : at + step] for at in range(0, len(payload), step)]
    for rank in team.peers:
        assert team.heard(rank) == sent, rank
    assert team.bad_checksums() == bad
    assert team.fanout.counts() == {0: (sends, 0, 0, 0, 0)} | dict.fromkeys((2, 3, 4), (0, sends, 0, len(sent), 0))


def test_copies_that_do_not_leave_are_counted(team: Team) -> None:
    """A queue that takes nothing refuses every copy; the send itself succeeds all the same (kernel-23)."""

    def queue(limit: int) -> None:
        with IPRoute() as ip:
            ip.tc("replace", "pfifo", ip.link_lookup(ifname="data0")[0], root=True, handle="1:", limit=limit)

    team.send(b"before")
    team.lab.run(OWN, queue, 0)
    for _ in range(3):
        team.send(bytes(4000), segment=1000)
    team.lab.run(OWN, queue, 1000)
    team.send(b"after")
    assert {rank: team.heard(rank) for rank in team.peers} == {rank: [b"before", b"after"] for rank in team.peers}
    assert team.fanout.counts() == {0: (5, 0, 0, 0, 0)} | dict.fromkeys((2, 3, 4), (0, 2, 3, 2, 12))
