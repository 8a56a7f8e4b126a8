"""Frames from Ethernet on: what is not ours passes untouched, and what is ours is told by its headers.

Frames are scapy's, with what other hosts may send to the same port or from the same address.
"""

from __future__ import annotations

import errno
import itertools
import random
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

import cases
import packed
import switch_cases
from kernel_world import DROP, HEADERS, HEADERS_IPV6, PASS, TX, KernelWorld
from loaders import both_loaders
from switch_cases import Step
from switch_world import SwitchWorld
from tailbound.wire.schema import HEADER_BYTES, UNKNOWN_SENDER, PacketType, Verdict
from tailbound_lab.bench.frames import frame
from tailbound_lab.bench.program_run import RunResult, run_xdp

scapy = pytest.importorskip("scapy.all", reason="missing capability 'scapy': pip install 'tailbound[test]'")

Make = Callable[..., KernelWorld]
MakeSwitch = Callable[..., SwitchWorld]
VLAN = 5
BODY = cases.contribution()
SOURCE, OWN = "02:7b:00:00:00:01", "02:7b:00:00:00:02"
#: With addresses: else scapy asks the network for them.
ETHER = scapy.Ether(src=SOURCE, dst=OWN)
UDP = scapy.UDP(sport=cases.PORT, dport=cases.PORT)


def ip(ipv6: bool = False, **fields: object) -> Any:
    """Rank 1 to rank 0."""
    ends = {"src": cases.ip_of(1, ipv6=ipv6), "dst": cases.ip_of(cases.RANK, ipv6=ipv6)} | fields
    return scapy.IPv6(**ends) if ipv6 else scapy.IP(**ends)


def on_vlan(body: bytes, *tags: int, priority: int = 0, port: int = cases.PORT, sender: int = 1) -> bytes:
    """A frame from a rank with ``tags`` of VLANs, the outermost first."""
    packet = ETHER
    for tag in tags:
        packet = packet / scapy.Dot1Q(vlan=tag, prio=priority)
    return bytes(packet / ip(src=cases.ip_of(sender)) / scapy.UDP(sport=cases.PORT, dport=port) / body)


def foreign(ipv6: bool) -> dict[str, bytes]:
    """What no job takes, by name."""
    found = {
        "ARP": ETHER / scapy.ARP(pdst=cases.ip_of(0)),
        "the other family": ETHER / ip(not ipv6) / UDP / BODY,
        "TCP to our port": ETHER / ip(ipv6) / scapy.TCP(dport=cases.PORT) / BODY,
        "another UDP port": ETHER / ip(ipv6) / scapy.UDP(dport=cases.PORT + 1) / BODY,
        "our port as source only": ETHER / ip(ipv6) / scapy.UDP(sport=cases.PORT, dport=9) / BODY,
        "a tag of a VLAN": ETHER / scapy.Dot1Q(vlan=VLAN) / ip(ipv6) / UDP / BODY,
        "by its type, not by its version": ETHER / ip(ipv6, version=4 if ipv6 else 5) / UDP / BODY,
    }
    if ipv6:
        extensions = {
            "hop-by-hop options": scapy.IPv6ExtHdrHopByHop(),
            "destination options": scapy.IPv6ExtHdrDestOpt(),
            "a routing header": scapy.IPv6ExtHdrRouting(addresses=[cases.ip_of(cases.RANK, ipv6=True)]),
            "a first fragment": scapy.IPv6ExtHdrFragment(m=1),
            "a last fragment": scapy.IPv6ExtHdrFragment(offset=9),
        }
        found |= {name: ETHER / ip(True) / header / UDP / BODY for name, header in extensions.items()}
        found["a neighbour is looked for"] = (
            ETHER / ip(True) / scapy.ICMPv6ND_NS(tgt=cases.ip_of(cases.RANK, ipv6=True))
        )
        others = ["ff02::1", "fe80::1", "fd7c::1:0:0", "fd7b:0:0:9::1:0:0", "fd7b::2:0:0", "fd7b::1:0:1"]
    else:
        found |= {
            "ICMP": ETHER / ip() / scapy.ICMP() / BODY,
            "IP options": ETHER / ip(options=scapy.IPOption(b"\x94\x04\0\0")) / UDP / BODY,
            "a first fragment": ETHER / ip(flags="MF") / UDP / BODY,
            "a last fragment": ETHER / ip(frag=64) / UDP / BODY,
            "another address, too short for a packet": ETHER / ip(dst=cases.ip_of(2)) / UDP / b"?",
        }
        others = [cases.ip_of(2), "239.192.7.7", "255.255.255.255", "0.0.0.1"]
    found |= {f"our port at {address}": ETHER / ip(ipv6, dst=address) / UDP / BODY for address in others}
    whole = bytes(ETHER / ip(ipv6) / UDP / BODY)
    ends = (HEADERS_IPV6 if ipv6 else HEADERS) - 1
    return {name: bytes(packet) for name, packet in found.items()} | {
        f"{size} bytes": whole[:size] for size in (14, 15, 33, 40, ends)
    }


def tagged_foreign(tag: int) -> dict[str, bytes]:
    """What a job on that VLAN, or without one (0), does not take."""
    return {
        "another VLAN": on_vlan(BODY, VLAN + 1),
        "two tags": on_vlan(BODY, tag, VLAN),
        "the VLAN inside another": on_vlan(BODY, VLAN + 1, tag),
        "another port": on_vlan(BODY, tag, port=cases.PORT + 1, priority=7),
        "a service tag": bytes(scapy.Ether(src=SOURCE, dst=OWN, type=0x88A8) / scapy.Raw(on_vlan(BODY, tag)[14:])),
        "ARP": bytes(ETHER / scapy.Dot1Q(vlan=tag, prio=3) / scapy.ARP(pdst=cases.ip_of(0))),
        **{f"{size} bytes": on_vlan(BODY, tag)[:size] for size in (14, 17, 18, 30, 45)},
    }


@both_loaders
@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_passes_untouched(make: Make, ipv6: bool) -> None:
    """With a job, without one, and where no address is known either. Rule: kernel-1."""
    world = make(ipv6=ipv6)
    for control in ({}, {"active": 0}, {"address": 0}):
        world.control(**control)
        untouched(world, foreign(ipv6) | ({} if ipv6 else tagged_foreign(0)))
    assert not world.store.ops["op"].any()


@both_loaders
def test_passes_untouched_on_a_vlan(make: Make) -> None:
    """Rule: kernel-1."""
    untouched(make(vlan=VLAN), tagged_foreign(VLAN))


@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_passes_a_switch_untouched(make_switch: MakeSwitch, ipv6: bool) -> None:
    """The same to the switch's address."""
    address = switch_cases.in_ipv6(switch_cases.ADDRESS) if ipv6 else switch_cases.ADDRESS
    places, family = (cases.ip_of(cases.RANK, ipv6=ipv6), address), socket.AF_INET6 if ipv6 else socket.AF_INET
    own, there = (socket.inet_pton(family, place) for place in places)
    untouched(make_switch(ipv6=ipv6), {name: data.replace(own, there) for name, data in foreign(ipv6).items()})


def untouched(world: KernelWorld | SwitchWorld, frames: dict[str, bytes]) -> None:
    for name, data in frames.items():
        assert world.run(data) == PASS, name
        assert world.back == data, name
    assert world.counted() == {}


@pytest.mark.parametrize("switch", [False, True], ids=["worker", "switch"])
def test_addresses_are_compared_to_the_last_bit(make: Make, make_switch: MakeSwitch, switch: bool) -> None:
    """Rules: kernel-1, kernel-8, kernel-24."""
    world: Any = (make_switch if switch else make)(ipv6=True)
    data = world.frame_of(Step(switch_cases.contribution(0), None) if switch else BODY)
    for at, bit in itertools.product((22, 38), range(128)):
        other = bytearray(data)
        other[at + bit // 8] ^= 1 << bit % 8
        assert world.run(bytes(other)) == (DROP if at == 22 else PASS), bit
    assert world.counted() == {Verdict.WRONG_ADDRESS: 128}


@both_loaders
@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_lengths_that_disagree(make: Make, ipv6: bool) -> None:
    """Of IP, of UDP and of the frame; a jumbogram (length 0) has an extension header. Rule: kernel-2."""
    world, size = make(ipv6=ipv6), 8 + len(BODY)
    for wrong, by in itertools.product(("ip", "udp", "frame"), (-16, -1, 1, 16)):
        more, udp, end = (by if wrong == name else 0 for name in ("ip", "udp", "frame"))
        length = {"plen": size + more} if ipv6 else {"len": 20 + size + more}
        packet = ip(ipv6, **length) / scapy.UDP(sport=cases.PORT, dport=cases.PORT, len=size + udp)
        data = bytes(ETHER / packet / BODY)
        data = data[:end] if end < 0 else data + bytes(end)
        assert world.judge(data) == (Verdict.BAD_LENGTH, 256), (wrong, by)
    assert world.judge(bytes(ETHER / ip(ipv6) / UDP / b"?")) == (Verdict.BAD_LENGTH, 256)
    if ipv6:
        assert world.judge(bytes(ETHER / ip(True, plen=0) / UDP / BODY)) == (Verdict.BAD_LENGTH, 256)


@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_the_same_from_scapy_is_ours(make: Make, ipv6: bool) -> None:
    """The control: with nothing odd about it the packet is taken, whatever its class and hops."""
    world = make(ipv6=ipv6)
    assert world.judge(bytes(ETHER / ip(ipv6) / UDP / BODY)) == (Verdict.STORED, 1)
    assert world.action == DROP
    odd = {"fl": 0xABCDE, "tc": 0xB8, "hlim": 1} if ipv6 else {"tos": 0xB8, "ttl": 1, "id": 7}
    other = ip(ipv6, src=cases.ip_of(2, ipv6=ipv6), **odd)
    assert world.judge(bytes(ETHER / other / UDP / cases.contribution(2))) == (Verdict.ADDED, 2)


@pytest.mark.parametrize(("active", "verdict"), [(1, Verdict.STORED), (0, Verdict.INACTIVE)])
def test_to_the_group_is_ours(make: Make, active: int, verdict: Verdict) -> None:
    """A group of the job's is; any other group is somebody else's (kernel-1)."""
    world = make()
    group = bytes(ETHER / ip(dst="239.192.7.7") / UDP / BODY)
    world.control(group=int.from_bytes(bytes([239, 192, 7, 7]), "little"), active=active)
    assert world.judge(group)[0] == verdict
    world.control(group=int.from_bytes(bytes([239, 192, 7, 8]), "little"))
    assert world.run(group) == PASS


# --- IPv6 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keyed", [False, True], ids=["check", "tag"])
@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_a_probe_comes_back_as_an_echo(make: Make, ipv6: bool, keyed: bool) -> None:
    """Whatever checksum of UDP it came with, as over veth it is only promised. Its mark stays here.

    Rules: kernel-18, kernel-26.
    """
    world, rng, rank = make(ranks=255, ipv6=ipv6), random.Random(6), 254
    world.control(rank=rank)
    if keyed:
        world.arm()
    proven = cases.tagged if keyed else bytes
    service, (own, peer) = "tc" if ipv6 else "tos", (cases.ip_of(r, ipv6=ipv6) for r in (cases.RANK, 2))
    for marks in range(4):
        fields, body = {"lateness": rng.randrange(99)}, rng.randbytes(16)
        probe = proven(cases.control_packet(PacketType.PROBE, body, sender=2, owner=rank, **fields))
        udp = scapy.UDP(sport=cases.PORT, dport=cases.PORT, chksum=rng.randrange(1 << 16))
        data = bytes(ETHER / ip(ipv6, src=peer, **{service: 0xBB}) / udp / probe)
        assert world.judge(data) == (Verdict.REFLECTED, 2)
        assert world.action == TX
        echo = proven(cases.control_packet(PacketType.ECHO, body, sender=rank, owner=2, seq=marks, **fields))
        udp = scapy.UDP(sport=cases.PORT, dport=cases.PORT, chksum=None if ipv6 else 0)
        there = scapy.Ether(src=OWN, dst=SOURCE) / ip(ipv6, src=own, dst=peer, **{service: 0xBA})
        assert world.back == bytes(there / udp / echo)
    assert world.store.peer_states["marked"].tolist()[:4] == [0, 0, 4, 0]
    for length in (0, 32) if ipv6 else ():  # the checksum would be made of other bytes than are there
        wrong = proven(cases.control_packet(PacketType.PROBE, bytes(length), sender=2, owner=rank))
        assert world.judge(world.frame_of(wrong)) == (Verdict.BAD_LENGTH, 2)


def judged(data: bytes, ipv6: bool) -> bool | None:
    """Whether a frame is for the job, by its bytes alone, and whether its lengths agree; None: it is not for it."""
    own = socket.inet_pton(socket.AF_INET6 if ipv6 else socket.AF_INET, cases.ip_of(cases.RANK, ipv6=ipv6))
    headers = HEADERS_IPV6 if ipv6 else HEADERS
    if len(data) < headers or data[12:14] != (b"\x86\xdd" if ipv6 else b"\x08\0"):
        return None
    head, (port, udp) = data[14 : headers - 8], struct.unpack_from(">HH", data, headers - 6)
    if ipv6:
        plain, length = head[0] >> 4 == 6 and head[6] == 17, int.from_bytes(head[4:6])
    else:
        plain = head[0] == 0x45 and head[9] == 17 and not int.from_bytes(head[6:8]) & 0x3FFF
        length = int.from_bytes(head[2:4]) - 20
    if not plain or head[-len(own) :] != own or port != cases.PORT:
        return None
    return length == udp == len(data) - headers + 8


@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_damaged_headers(make: Make, ipv6: bool) -> None:
    """Random bits before the payload, and frames cut short: told apart as a plain reading of the bytes says."""
    world, rng = make(ipv6=ipv6), random.Random(6)
    whole, headers = world.frame_of(BODY), HEADERS_IPV6 if ipv6 else HEADERS
    seen = set()
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2))):
            data[rng.randrange(12, headers)] ^= 1 << rng.randrange(8)
        if rng.random() < 0.2:
            del data[rng.randrange(14, len(data)) :]
        said, before = judged(bytes(data), ipv6), world.ledger()
        world.run(bytes(data))
        gained = world.ledger() - before
        assert gained.sum() == (said is not None), data.hex()
        if said is None:
            assert (world.action, world.back) == (PASS, bytes(data))
        else:
            assert (gained[:, Verdict.BAD_LENGTH].sum() == 1) == (not said), data.hex()
        seen.add(said)
    assert seen == {None, False, True}


# --- VLANs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_on_a_vlan_rows_are_summed_and_words_pass_as_they_came(make: Make, ipv6: bool) -> None:
    """With the tag of the VLAN, and without: the NIC may have stripped it. Words pass with tag, priority and all."""
    for tagging in (ETHER / scapy.Dot1Q(vlan=VLAN, prio=6), ETHER):
        world = make(ipv6=ipv6, vlan=VLAN)
        assert world.judge(bytes(tagging / ip(ipv6) / UDP / BODY)) == (Verdict.STORED, 1)
        assert world.action == DROP
        assert world.judge(bytes(tagging / ip(ipv6) / UDP / cases.contribution(2)))[0] is Verdict.WRONG_ADDRESS
        word = bytes(tagging / ip(ipv6) / UDP / cases.ready())
        assert world.judge(word) == (Verdict.CONTROL_PASSED, 1)
        assert (world.action, world.back) == (PASS, word)
        # bytes behind the IP packet are refused with a tag as without one (kernel-2)
        assert world.judge(bytes(tagging / ip(ipv6) / UDP / BODY) + bytes(4)) == (Verdict.BAD_LENGTH, 256)


def test_probes_are_turned_round_into_the_vlan(make: Make) -> None:
    """Nobody tags what XDP sends, so an echo has a tag even where the probe had lost its own."""
    world = make(vlan=VLAN)
    for tags in ((VLAN,), ()):
        world.judge(on_vlan(cases.control_packet(PacketType.PROBE, bytes(32)), *tags, priority=3))
        echo = scapy.Ether(world.back)
        assert world.action == TX
        assert (echo.src, echo.dst) == (OWN, SOURCE)
        assert (echo[scapy.Dot1Q].vlan, echo[scapy.Dot1Q].prio) == (VLAN, 3 if tags else 0)
        assert (echo[scapy.IP].src, echo[scapy.IP].dst) == (cases.ip_of(0), cases.ip_of(1))
        found = packed.parse(bytes(echo[scapy.UDP].payload))
        assert found is not None
        assert found[0]["type"] == PacketType.ECHO


def test_a_priority_without_a_vlan_is_no_tag(make: Make) -> None:
    """Fabrics with priority flow control send them. The stack sees the same packet; what is not ours keeps its tag.

    Rule: kernel-1.
    """
    world = make()
    assert world.judge(on_vlan(BODY, 0, priority=5)) == (Verdict.STORED, 1)
    assert world.judge(on_vlan(cases.ready(), 0, priority=5)) == (Verdict.CONTROL_PASSED, 1)
    assert (world.action, world.back) == (PASS, on_vlan(cases.ready()))
    assert world.judge(on_vlan(cases.control_packet(PacketType.PROBE, bytes(32)), 0))[0] == Verdict.REFLECTED
    assert packed.parse(world.back[HEADERS:]) is not None


def test_a_job_with_a_key_on_a_vlan(make: Make) -> None:
    """The program for tags of keys takes those of VLANs off and puts them back, too (auth-2)."""
    world = make(vlan=VLAN)
    world.arm()
    assert world.judge(on_vlan(cases.tagged(BODY), VLAN)) == (Verdict.STORED, 1)
    assert world.judge(on_vlan(BODY, VLAN)) == (Verdict.FORGED, 256)
    data = on_vlan(cases.tagged(cases.ready()), VLAN, priority=6)
    assert world.judge(data) == (Verdict.CONTROL_PASSED, 1)
    assert (world.action, world.back) == (PASS, data)


# --- frames in pieces ---------------------------------------------------------------------------------------------

#: Bytes of the first piece, from none at all to all headers.
SHORT = (0, 14, 34, HEADERS - 1, HEADERS, HEADERS + HEADER_BYTES - 1, HEADERS + HEADER_BYTES)


def in_pieces(program: int, data: bytes, linear: int) -> RunResult:
    try:
        return run_xdp(program, data, 1, linear)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pytest.skip("missing capability 'test runs of frames in pieces': needs Linux 6.18")


def test_in_pieces_ours_is_counted_and_dropped_and_foreign_passes(make: Make) -> None:
    """However short the first piece is. Rules: kernel-1, kernel-2, kernel-21."""
    world = make()
    data, other = world.frame_of(BODY), world.frame_of(BODY, port=cases.PORT + 1)
    for i, linear in enumerate(SHORT, 1):
        assert in_pieces(world.program, data, linear).action == DROP, linear
        done = in_pieces(world.program, other, linear)
        assert (done.action, done.data) == (PASS, other), linear
        assert world.counted() == {Verdict.NOT_LINEAR: i}, linear
        assert world.ledger()[UNKNOWN_SENDER, Verdict.NOT_LINEAR] == i, linear
    assert not world.store.sums.any()


def test_in_pieces_the_switch_counts_its_own(make_switch: MakeSwitch) -> None:
    switch, packet, job = make_switch(), switch_cases.contribution(0), switch_cases.JOB
    data = frame(packet, switch_cases.ip_of(0), job.address, job.port, job.port)
    other = frame(packet, switch_cases.ip_of(0), job.address, job.port, job.port + 1)
    for i, linear in enumerate(SHORT, 1):
        assert in_pieces(switch.switch.program, data, linear).action == DROP, linear
        assert in_pieces(switch.switch.program, other, linear).action == PASS, linear
        assert switch.counted() == {Verdict.NOT_LINEAR: i}, linear
