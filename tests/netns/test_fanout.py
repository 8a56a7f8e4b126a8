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

from tailbound.kernel import ethtool
from tailbound.kernel.fanout import Fanout
from tailbound.transport.sockets import reserve
from tailbound.wire import packets
from tailbound.wire.schema import PacketType
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

Make = Callable[..., Cluster]
SocketOf = Callable[..., socket.socket]
WORKERS, OWN, PORT, SEGMENT = 5, 1, 7400, 1472
GOODBYE = b"goodbye"
_UDP_SEGMENT = 103
#: Who computes checksums: nobody (they are only promised, as on every veth), the sender's stack, or the switch, from
#: what the sender's stack has promised.
CHECKSUMS = ("promised", "sender", "switch")


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


@pytest.fixture(params=["auto", "clsact"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_team(tailbound_lab: Make, datagram_socket: SocketOf) -> Iterator[Callable[..., Team]]:
    """``(way="auto", **lab)`` -> a team in which every other worker is live."""
    with contextlib.ExitStack() as stack:

        def make(way: str = "auto", **settings: object) -> Team:
            lab = tailbound_lab(workers=WORKERS, **settings)
            ranks = [rank for rank in range(WORKERS) if rank != OWN]
            peers = {rank: datagram_socket(lab, rank, port=PORT) for rank in ranks}
            for sock in peers.values():
                reserve(sock, socket.SO_RCVBUF, 64 << 20)
            out, plain = (datagram_socket(lab, OWN) for _ in range(2))
            interface = lab.workers[OWN].interface
            places = {rank: (lab.workers[rank].address, PORT) for rank in ranks}
            # the program of a small job, and once that of all jobs
            most = 255 if way == "clsact" else WORKERS - 1
            attach = partial(Fanout.attach, address=lab.workers[OWN].address)
            fanout = lab.run(OWN, attach, interface, out.getsockname()[1], PORT, "auto", way, 1, most)
            stack.callback(fanout.close)
            fanout.set_peers(OWN, {rank: address for rank, (address, _) in places.items()})
            fanout.live(ranks)
            for rank, place in places.items():  # alone, which shows the program the way
                plain.sendto(packets.packet(packets.header(type=PacketType.PROBE, owner=rank), b""), place)
                peers[rank].recv(1 << 16)
            return Team(lab, out, plain, peers, fanout, places)

        yield make


def finish(team: Team, checksums: str) -> None:
    """Lets the sender's stack, or the switch on the way to everybody, compute checksums."""
    data = Link.DATA
    if checksums == "sender":
        team.lab.run(OWN, ethtool.set_tx_checksum, data.interface, False)
    elif checksums == "switch":
        for rank in range(WORKERS):
            namespaces.call(team.lab.topology.switch, ethtool.set_tx_checksum, data.port(rank), False)


@pytest.mark.parametrize("checksums", CHECKSUMS)
def test_every_peer_gets_every_segment(make_team: Callable[..., Team], way: str, checksums: str) -> None:
    """Bursts of many segments, with a short one at the end, of one, and single packets, odd and even."""
    team = make_team(way)
    finish(team, checksums)
    sent: list[bytes] = []
    for seed, (length, segment) in enumerate(
        [
            (44 * SEGMENT, SEGMENT),
            (44 * SEGMENT - 700, SEGMENT),
            (65507, 1000),
            (2 * 64, 64),
            (SEGMENT, 0),
            (333, 0),
            (1, 0),
        ]
    ):
        payload = noise(length, seed)
        team.send(payload, segment=segment)
        sent += pieces(payload, segment or length)
    assert all(team.heard(rank) == sent for rank in team.peers)
    assert team.bad_checksums() == 0
    counts = team.fanout.counts()
    assert counts == {0: (7, 0, 0, 0, 0)} | {rank: (0, 7, 0, len(sent), 0) for rank in (2, 3, 4)}


def test_every_peer_gets_every_segment_over_ipv6(make_team: Callable[..., Team], way: str) -> None:
    """Where a checksum of 0 is none at all, and a stack that gets one drops the packet."""
    team, sent = make_team(way, ipv6=True), []
    for seed, checksums in enumerate(("promised", "switch", "sender")):  # each on top of those before
        finish(team, checksums)
        for length, segment in ((44 * 1452 - 700, 1452), (65487, 1000), (333, 0), (1, 0)):
            payload = noise(length, seed)
            team.send(payload, segment=segment)
            sent += pieces(payload, segment or length)
        words = np.arange(0, 1 << 16, 7, dtype=">u2").tobytes()  # some of whose sums are 0
        for at in range(0, len(words), 80):
            team.send(words[at : at + 80], segment=4)
            sent += pieces(words[at : at + 80], 4)
    for rank in team.peers:
        assert team.heard(rank) == sent, rank
    assert team.bad_checksums() == 0
    assert {rank: counts.failed for rank, counts in team.fanout.counts().items()} == dict.fromkeys(team.peers, 0)


def test_checksums_are_really_checked(make_team: Callable[..., Team]) -> None:
    """The control of the test above: a datagram with a wrong checksum is not heard, and is counted."""
    team = make_team()
    finish(team, "sender")

    def spoiled() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP) as raw:
            raw.sendto(struct.pack(">HHHH", 9, PORT, 8 + 4, 0x1234) + b"abcd", team.places[0])

    team.lab.run(OWN, spoiled)
    assert team.heard(0) == []
    assert team.bad_checksums() == 1


@pytest.mark.parametrize("gso", [True, False])
def test_checksums_near_zero(make_team: Callable[..., Team], gso: bool) -> None:
    """Every value of a payload's last word: among them those whose sums are 0, which UDP writes as 0xffff."""
    team = make_team()
    finish(team, "sender")
    words = np.arange(1 << 16, dtype=">u2").tobytes()
    sent = []
    for start in range(0, len(words), 80):
        payload = b"".join(b"\0\0" + words[at : at + 2] for at in range(start, min(start + 80, len(words)), 2))
        if gso:
            team.send(payload, segment=4)
        sent += pieces(payload, 4)
    if not gso:
        sent = sent[::7] + sent[-64:]
        for payload in sent:
            team.send(payload)
    for rank in team.peers:
        assert team.heard(rank) == sent, rank
    assert team.bad_checksums() == 0


def test_excluded_and_dead_peers_get_nothing(make_team: Callable[..., Team]) -> None:
    team = make_team()
    burst = noise(4 * 1000)
    team.fanout.live({0, 3})
    team.send(burst, segment=1000)
    assert {rank: len(team.heard(rank)) for rank in team.peers} == {0: 4, 2: 0, 3: 4, 4: 0}
    team.fanout.live({4, OWN})
    assert team.fanout.lead == 4
    team.send(burst, segment=1000)
    assert {rank: len(team.heard(rank)) for rank in team.peers} == {0: 0, 2: 0, 3: 0, 4: 4}
    team.fanout.live(())
    assert team.fanout.lead is None
    team.send(burst, 4, 1000)
    assert {rank: len(team.heard(rank)) for rank in team.peers} == {0: 0, 2: 0, 3: 0, 4: 4}
    team.fanout.live({2, 3, 4})
    team.send(b"back")
    assert {rank: team.heard(rank) for rank in team.peers} == {0: [], 2: [b"back"], 3: [b"back"], 4: [b"back"]}
    counts = team.fanout.counts()
    assert {rank: (c.leads, c.clones, c.packets) for rank, c in counts.items()} == {
        0: (1, 0, 0),
        2: (0, 1, 1),
        3: (0, 2, 5),
        4: (2, 0, 0),
    }


def test_what_is_not_for_all_is_left_alone(make_team: Callable[..., Team]) -> None:
    """Other sockets, other receivers, other ports of the lead: nobody gets a copy."""
    team = make_team()
    lead = team.fanout.lead
    assert lead == 0
    team.plain.sendto(b"plain", team.places[lead])
    team.send(b"to two", 2)
    team.out.sendto(b"elsewhere", (team.places[lead][0], PORT + 77))
    assert {rank: team.heard(rank) for rank in team.peers} == {0: [b"plain"], 2: [b"to two"], 3: [], 4: []}
    assert team.fanout.counts() == {}


def test_copies_leave_in_the_order_of_ranks(make_team: Callable[..., Team]) -> None:
    """Rank + 1 first, the burst itself last, all with the sum of the pseudo-header: seen at the sender's way out."""
    team = make_team()

    def listen() -> socket.socket:
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        tap.bind((team.lab.workers[OWN].interface, 0))
        tap.settimeout(20)
        return tap

    with team.lab.run(OWN, listen) as tap:
        team.send(noise(3000), segment=1000)
        ranks = []
        while len(ranks) < 4:
            frame = tap.recv(1 << 16)
            source, port, length, check = struct.unpack_from(">4H", frame, 34)
            if source == team.fanout.port:
                worker = next(w for w in team.lab.workers if frame[30:34] == socket.inet_aton(w.address))
                ranks.append(worker.rank)
                assert port == PORT
                assert length == len(frame) - 34 == 8 + 3000  # in one piece
                assert check == _sum(frame[26:34] + struct.pack(">HH", 17, length))
                assert frame[:6].hex(":") == worker.mac
                assert _sum(frame[14:34]) == 0xFFFF
    assert ranks == [2, 3, 4, 0]


def _sum(data: bytes) -> int:
    """One's complement sum of 16-bit words (RFC 1071), not complemented."""
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def test_copies_that_do_not_leave_are_counted(make_team: Callable[..., Team]) -> None:
    """A queue that takes nothing refuses every copy; the send itself succeeds all the same (kernel-23)."""
    team = make_team()
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


def test_a_peer_without_a_place_is_counted(make_team: Callable[..., Team]) -> None:
    """What the host took out of the table under the program's feet is a failed copy, and harms nobody else."""
    team = make_team()
    team.fanout.maps.arrays["fanout_peers"]["address"][3] = 0
    team.send(noise(2000), segment=1000)
    assert {rank: len(team.heard(rank)) for rank in team.peers} == {0: 2, 2: 2, 3: 0, 4: 2}
    assert team.fanout.counts()[3] == (0, 0, 1, 0, 2)


def test_closing_leaves_plain_sends(make_team: Callable[..., Team], way: str) -> None:
    team = make_team(way)
    team.send(b"all")
    team.fanout.close()
    team.fanout.close()
    team.send(b"one", 0)
    assert {rank: team.heard(rank) for rank in team.peers} == {
        0: [b"all", b"one"],
        2: [b"all"],
        3: [b"all"],
        4: [b"all"],
    }
