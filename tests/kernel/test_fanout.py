"""The fan-out program: its packets by BPF_PROG_TEST_RUN on a loopback of its own; attaching, strangers, leftovers."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator

import pytest
from pyroute2 import IPRoute

import cases
import packed
import veths
from bpf_calls import run_tc
from tailbound.errors import AttachError, CapabilityError
from tailbound.kernel import net, pin, syscalls
from tailbound.kernel.fanout import Fanout, attach_tcx
from tailbound.kernel.pin import Receiver
from tailbound.wire.schema import PacketType

scapy = pytest.importorskip("scapy.all", reason="missing capability 'scapy': pip install 'tailbound[test]'")
pytestmark = pytest.mark.needs("netns", "tcx")
Make = Callable[..., Fanout]

OWN, THERE, PORT, SOURCE = "198.18.0.1", "198.18.0.2", 7400, 40000
MACS = {rank: bytes((2, 0, 0, 0, 9, rank)) for rank in range(5)}
PLACES = {1: "198.18.0.2", 2: "198.18.0.250", 3: "10.1.2.3", 4: "255.255.255.254"}
#: return TC_ACT_SHOT
SHOOT = bytes.fromhex("b700000002000000 9500000000000000")


def know_rank_2() -> None:
    """Rank 2, whom nobody has to be, is a neighbour."""
    with IPRoute() as ip:
        index = net.index_of("tbx")
        ip.neigh("replace", dst=PLACES[2], lladdr=MACS[2].hex(":"), ifindex=index, state="permanent")


@pytest.fixture
def attach(wire: list[str], loader: str) -> Iterator[Callable[..., Fanout]]:
    """Makes fan-outs on ``tbx`` for the peers of ``PLACES``, none of them live yet."""
    made: list[Fanout] = []
    know_rank_2()

    def new() -> Fanout:
        fanout = Fanout.attach("tbx", SOURCE, PORT, loader)
        made.append(fanout)
        fanout.set_peers(0, PLACES)
        return fanout

    yield new
    for fanout in made:
        fanout.close()


@pytest.fixture
def tap(wire: list[str]) -> Iterator[socket.socket]:
    """What passes the loopback, whole frames."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as out:
        out.bind(("lo", 0))
        out.settimeout(20)
        yield out


def frame(rank: int, payload: bytes, address: str = "", sport: int = SOURCE, dport: int = PORT, **fields: int) -> bytes:
    """A burst's packet to ``rank``, or to another address, with scapy's checksums."""
    ether = scapy.Ether(dst=MACS[rank].hex(":"), src="02:00:00:00:09:00")
    ip = scapy.IP(src=OWN, dst=address or PLACES[rank], id=7, flags="DF", **fields)
    return bytes(ether / ip / scapy.UDP(sport=sport, dport=dport) / payload)


def sole(rank: int) -> bytes:
    """What a rank gets alone."""
    return bytes(packed.packet(packed.header(type=PacketType.PROBE, sender=0, owner=rank), b""))


def show(fanout: Fanout, ranks: Iterable[int] = tuple(PLACES)) -> None:
    """Lets packets for single ranks pass, by which the program knows the ways."""
    for rank in ranks:
        run_tc(fanout.program, frame(rank, sole(rank), sport=SOURCE - 9))


def seen(tap: socket.socket, count: int) -> list[bytes]:
    """The next ``count`` frames that went out; loopback shows each twice."""
    found: list[bytes] = []
    while len(found) < count:
        data, (_, _, kind, *_) = tap.recvfrom(1 << 17)
        if kind == socket.PACKET_OUTGOING:
            found.append(data)
    return found


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 5])
def test_clones_are_as_if_sent_to_each_peer(attach: Make, tap: socket.socket, payload: bytes) -> None:
    """Packets from the job's port, with a whole checksum: clones equal what scapy makes for the peer.

    Rule: kernel-23.
    """
    fanout = attach()
    fanout.live({1, 2, 3, 4})
    assert fanout.lead == 4
    show(fanout)
    for port in range(SOURCE - 1, SOURCE + 2):
        result = run_tc(fanout.program, frame(4, payload, sport=port))
        assert struct.pack("=I", result.action) == struct.pack("=i", -1)
        assert result.data == frame(4, payload, sport=port)
    assert seen(tap, 3) == [frame(rank, payload) for rank in (1, 2, 3)]
    assert fanout.counts() == {4: (1, 0, 0, 0, 0)} | dict.fromkeys((1, 2, 3), (0, 1, 0, 1, 0))


def test_a_burst_is_copied_for_as_many_peers_as_there_may_be(attach: Make, tap: socket.socket) -> None:
    """From the own rank on."""
    fanout, own, peers = attach(), 100, 255
    order = [(own + i) % (peers + 1) for i in range(1, peers + 1)]
    lead, places = order[-1], {rank: f"10.0.0.{rank}" for rank in order}
    fanout.set_peers(own, places)
    fanout.live(order)
    assert fanout.lead == lead
    for rank in order:
        run_tc(fanout.program, frame(1, sole(rank), places[rank], sport=SOURCE - 9))
    run_tc(fanout.program, frame(1, b"abcd", places[lead]))
    assert [data[33] for data in seen(tap, peers - 1)] == order[:-1]
    assert fanout.counts() == {lead: (1, 0, 0, 0, 0)} | dict.fromkeys(order[:-1], (0, 1, 0, 1, 0))


def test_only_bursts_of_the_socket_to_the_lead(attach: Make) -> None:
    """Fragments, options, other protocols, sources and receivers, IPv6, VLANs and rubbish go on as they are.

    Rule: kernel-23.
    """
    fanout = attach()
    wanted = frame(4, b"abcd")

    def tried(data: bytes) -> bool:
        before = sum(c.leads for c in fanout.counts().values())
        result = run_tc(fanout.program, data)
        assert result.data == data
        assert struct.pack("=I", result.action) == struct.pack("=i", -1)
        return sum(c.leads for c in fanout.counts().values()) > before

    assert not tried(wanted)  # nobody is live
    fanout.live({4})
    assert tried(wanted)
    others = {
        "another receiver": frame(3, b"abcd"),
        "a fragment": frame(4, b"abcd", frag=3),
        "TCP": frame(4, b"abcd", proto=6),
        "options": wanted[:14] + b"\x46" + wanted[15:],
        "another source": wanted[:26] + socket.inet_aton(THERE) + wanted[30:],
        "another port of the lead": frame(4, b"abcd", dport=PORT + 1),
        "VLAN": wanted[:12] + b"\x81\x00\x00\x05" + wanted[12:],
        "too short": wanted[:41],
        "ARP": wanted[:12] + b"\x08\x06" + wanted[14:],
    }
    assert {name: tried(data) for name, data in others.items()} == dict.fromkeys(others, False)
    fanout.live(())
    assert not tried(wanted)


def test_the_way_to_a_peer_is_that_of_its_newest_packet(attach: Make, tap: socket.socket) -> None:
    """Before there was one a copy is refused; what only looks like one says nothing.

    Rule: kernel-23.
    """
    fanout, moved = attach(), bytes((2, 0, 0, 0, 9, 77))
    fanout.live({2, 4})
    no_way = [
        frame(2, sole(4)),  # of another rank
        frame(2, sole(2), PLACES[4], sport=SOURCE - 9),
        frame(2, sole(2), dport=PORT + 1),
        frame(2, sole(2)[:7]),
    ]
    for data in [*no_way, frame(4, b"abcd")]:
        run_tc(fanout.program, data)
    assert fanout.counts()[2] == (0, 0, 1, 0, 1)
    show(fanout)
    run_tc(fanout.program, moved + frame(2, sole(2))[6:])
    run_tc(fanout.program, frame(4, b"abcd"))
    assert seen(tap, 1) == [moved + frame(2, b"abcd")[6:]]


def test_no_suspect_leads_unless_all_are(attach: Make) -> None:
    """A burst to a host that is gone waits for its neighbour, in front of the program."""
    fanout = attach()
    order = fanout.maps.arrays["fanout"]["order"][0]
    for suspects, lead, copies in (
        ({4}, 3, [1, 2, 4]),
        ({2, 4}, 3, [1, 2, 4]),
        ({3, 4}, 2, [1, 3, 4]),
        ({1, 2, 3, 4}, 4, [1, 2, 3]),
        ((), 4, [1, 2, 3]),
    ):
        fanout.live({1, 2, 3, 4}, suspects)
        assert (fanout.lead, order[:3].tolist()) == (lead, copies)


# -- attaching ----------------------------------------------------------------------------------------


def bound() -> socket.socket:
    """The socket that a job sends its bursts by."""
    out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    out.bind((OWN, SOURCE))
    return out


def send(fanout: Fanout) -> bool:
    """A datagram to the lead by the stack; whether the program saw it."""
    before = sum(c.leads for c in fanout.counts().values())
    assert fanout.lead is not None
    with bound() as out:
        out.sendto(b"abcd", (PLACES[fanout.lead], PORT))
    return sum(c.leads for c in fanout.counts().values()) > before


def test_attach_and_detach(attach: Make) -> None:
    """Its maps outlive it here: they say whether the program still sees packets that leave."""
    fanout = attach()
    assert syscalls.prog_info(fanout.program).name == "tb_fanout"
    fanout.live({1})
    settings, counts = (fanout.maps.arrays[name] for name in ("fanout", "fanout_counts"))
    active = settings.copy()
    assert send(fanout)
    before = counts.copy()
    fanout.close()
    fanout.close()
    settings[:] = active
    with bound() as out:
        out.sendto(b"abcd", (PLACES[1], PORT))
    assert (counts == before).all()


class Stranger:
    """Somebody else's program at the same place, without a compiler."""

    def __init__(self, code: bytes) -> None:
        self.program = syscalls.prog_load(code, name="stranger", kind=syscalls.PROG_TYPE_TC)
        self._held = [attach_tcx(self.program, "tbx"), self.program]

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop(0))


def test_a_foreign_program_stays_and_decides(attach: Make) -> None:
    """The oldest sees a packet first; what a stranger drops does not leave.

    Rules: kernel-23, kernel-25.
    """
    older = attach()
    with contextlib.closing(Stranger(SHOOT)) as stranger:
        for ours, first in ((older, True), (None, False)):
            fanout = ours or attach()
            fanout.live({1, 2})
            assert send(fanout) == first
            assert fanout.counts() == ({1: (0, 0, 1, 0, 1), 2: (1, 0, 0, 0, 0)} if first else {})
            fanout.close()
        assert left_by(stranger) == b"after"


def left_by(stranger: Stranger) -> bytes:
    """The first payload that leaves when one is sent while the stranger is there, and one after it has gone."""
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as tap,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out,
    ):
        tap.bind(("tbx", 0))
        tap.settimeout(20)
        out.sendto(b"while", (PLACES[2], PORT))
        stranger.close()
        out.sendto(b"after", (PLACES[2], PORT))
        while (data := tap.recv(1 << 16))[30:34] != socket.inet_aton(PLACES[2]):
            pass
        return data[42:]


def test_a_refusal_says_what_goes_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(syscalls, "link_create", refused)
    with pytest.raises(CapabilityError, match=r"tc egress of lo \(errno 22: .*Linux 6\.6.*; training works without"):
        attach_tcx(-1, "lo")


def test_the_interface_may_go_first(own_wire: list[str], loader: str) -> None:
    fanout = Fanout.attach("tbx", SOURCE, PORT, loader)
    veths.delete("tbx")
    fanout.close()


@pytest.mark.needs("root")
def test_pinned(wire: list[str], loader: str) -> None:
    """Pinned beside the worker's program, used by who may open the maps, gone with it."""
    from tailbound.datapath.xdp import XdpDatapath

    with pytest.raises(CapabilityError, match="cannot pin"):
        Fanout.pin("tbx", PORT, loader)
    with pytest.raises(AttachError, match="nothing is pinned"):
        Fanout.open("tbx", SOURCE)
    XdpDatapath.pin(Receiver("tbx", cases.PORT, cases.WIDTH, cases.SUM_ROWS, cases.RESULT_ROWS), loader)
    Fanout.pin("tbx", PORT, loader)
    for _ in range(2):
        fanout = Fanout.open("tbx", SOURCE)
        fanout.set_peers(0, {1: PLACES[1]})
        fanout.live({1})
        assert send(fanout)
        assert fanout.counts() == {1: (1, 0, 0, 0, 0)}
        fanout.close()
    fanout = Fanout.open("tbx", SOURCE)
    fanout.set_peers(0, {1: PLACES[1]})
    fanout.live({1})
    assert pin.remove("tbx")
    assert not send(fanout)
    fanout.close()
    with pytest.raises(AttachError, match="nothing is pinned"):
        Fanout.open("tbx", SOURCE)
