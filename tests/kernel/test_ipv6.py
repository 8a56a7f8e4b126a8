"""The worker's program for jobs over IPv6: the same rules behind another header, parsed with every bound checked.

The header is RFC 8200's; frames are scapy's, with what other hosts may send to the same port or from the same address.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import numpy as np
import pytest

import cases
from case_worlds import ACTIONS, prepare, udp_after
from kernel_world import DROP, HEADERS_IPV6, PASS, TX, KernelWorld, ip_of, same_memory
from loaders import loader as loader
from tailbound.kernel import syscalls
from tailbound.kernel.frames import frame, internet_checksum
from tailbound.wire import packets
from tailbound.wire.schema import PacketType, Verdict

scapy = pytest.importorskip("scapy.all", reason="missing capability 'scapy': pip install 'tailbound[test]'")

PEER, OWN = ip_of(1, ipv6=True), ip_of(cases.RANK, ipv6=True)
BODY = cases.contribution()
#: With addresses: else scapy asks the network for them.
ETHER = scapy.Ether(src="02:7b:00:00:00:01", dst="02:7b:00:00:00:02")
UDP = scapy.UDP(sport=cases.PORT, dport=cases.PORT)
#: Offsets of the IPv6 and the UDP header, and the first byte and protocol of the former.
_IP, _UDP, _SIX, _NEXT_UDP = 14, 54, 6, 17


def ours(**fields: object) -> scapy.IPv6:
    return scapy.IPv6(**({"src": PEER, "dst": OWN} | fields))


@pytest.fixture
def world(make: Callable[..., KernelWorld]) -> KernelWorld:
    """A job over IPv6, whose ranks' addresses end in four bytes of 0."""
    return make(ipv6=True)


@pytest.mark.parametrize("keyed", [False, True], ids=["check", "tag"])
def test_the_cases_are_judged_as_over_ipv4(world: KernelWorld, request: pytest.FixtureRequest, keyed: bool) -> None:
    """Verdicts, what the kernel does with a frame, and memory like that of the udp datapath."""
    thorough = request.config.getoption("--thorough")
    some = cases.CASES if thorough else cases.CASES[::8] if keyed else cases.CASES[::2]
    for plain in some:
        case = cases.with_tags(plain) if keyed else plain
        world.begin(registered=case.registered)
        prepare(world, case, armed=keyed)
        assert world.take(case.packet, case.source) == (case.verdict, case.sender), case.name
        assert world.abandoned == case.abandoned, case.name
        assert world.action == ACTIONS.get(case.verdict, DROP), case.name
        if case.verdict != Verdict.REFLECTED:
            assert world.back == world.frame_of(case.packet, case.source), case.name
        same_memory(world, udp_after(case, armed=keyed, ipv6=True))


FOREIGN = {
    "IPv4": ETHER / scapy.IP(src=cases.ip_of(1), dst=cases.ip_of(0)) / UDP / BODY,
    "ARP": ETHER / scapy.ARP(pdst=cases.ip_of(0)),
    "TCP to our port": ETHER / ours() / scapy.TCP(dport=cases.PORT) / BODY,
    "a neighbour is looked for": ETHER / ours() / scapy.ICMPv6ND_NS(tgt=OWN),
    "another UDP port": ETHER / ours() / scapy.UDP(dport=cases.PORT + 1) / BODY,
    "our port as source only": ETHER / ours() / scapy.UDP(sport=cases.PORT, dport=9) / BODY,
    "hop-by-hop options": ETHER / ours() / scapy.IPv6ExtHdrHopByHop() / UDP / BODY,
    "destination options": ETHER / ours() / scapy.IPv6ExtHdrDestOpt() / UDP / BODY,
    "a routing header": ETHER / ours() / scapy.IPv6ExtHdrRouting(addresses=[OWN]) / UDP / BODY,
    "a first fragment": ETHER / ours() / scapy.IPv6ExtHdrFragment(m=1) / UDP / BODY,
    "a last fragment": ETHER / ours() / scapy.IPv6ExtHdrFragment(offset=9) / UDP / BODY,
    "IPv6 by its type, not by its version": ETHER / ours(version=4) / UDP / BODY,
    "a tag of a VLAN": ETHER / scapy.Dot1Q(vlan=5) / ours() / UDP / BODY,
    "everybody on the link": ETHER / ours(dst="ff02::1") / UDP / BODY,
    "a link-local address": ETHER / ours(dst="fe80::1") / UDP / BODY,
    **{
        f"another address in word {i}": ETHER / ours(dst=address) / UDP / BODY
        for i, address in enumerate(["fd7c::1:0:0", "fd7b:0:0:9::1:0:0", "fd7b::2:0:0", "fd7b::1:0:1"])
    },
}


def test_what_is_not_ours_passes_untouched(world: KernelWorld) -> None:
    """Rule: kernel-1."""
    whole = bytes(ETHER / ours() / UDP / BODY)
    frames = {name: bytes(packet) for name, packet in FOREIGN.items()}
    frames |= {f"{size} bytes": whole[:size] for size in (14, 15, 33, 53, 54, 61)}
    for name, data in frames.items():
        assert world.run(data) == PASS, name
        assert world.back == data, name
    assert not world.ledger().any()
    assert not world.store.ops["op"].any()


def test_the_same_from_scapy_is_ours(world: KernelWorld) -> None:
    """The control: with nothing odd about it the packet is taken, whatever its flow label, class and hops."""
    assert world.judge(bytes(ETHER / ours() / UDP / BODY)) == (Verdict.STORED, 1)
    assert world.action == DROP
    odd = ours(src=ip_of(2, ipv6=True), fl=0xABCDE, tc=0xB8, hlim=1)
    assert world.judge(bytes(ETHER / odd / UDP / cases.contribution(2))) == (Verdict.ADDED, 2)


def test_sources_are_compared_to_the_last_bit(world: KernelWorld) -> None:
    """kernel-8, in each of the four words."""
    for at in (8, 13, 16, 23):
        data = bytearray(bytes(ETHER / ours() / UDP / BODY))
        data[_IP + at] ^= 1
        assert world.judge(bytes(data)) == (Verdict.WRONG_ADDRESS, 256), at


def test_lengths_that_disagree(world: KernelWorld) -> None:
    """kernel-2: of the IPv6 header, of UDP and of the frame; a jumbogram (length 0) has an extension header."""
    for wrong in ("ip", "udp", "frame"):
        for by in (-16, -1, 1, 16):
            ip, udp, end = (by if wrong == name else 0 for name in ("ip", "udp", "frame"))
            size = 8 + len(BODY)
            packet = ours(plen=size + ip) / scapy.UDP(sport=cases.PORT, dport=cases.PORT, len=size + udp)
            data = bytes(ETHER / packet / BODY)
            data = data[:end] if end < 0 else data + bytes(end)
            assert world.judge(data) == (Verdict.BAD_LENGTH, 256), (wrong, by)
    assert world.judge(bytes(ETHER / ours(plen=0) / UDP / BODY)) == (Verdict.BAD_LENGTH, 256)
    assert world.judge(bytes(ETHER / ours() / UDP / b"?")) == (Verdict.BAD_LENGTH, 256)


def whole_echo(world: KernelWorld, probe: bytes) -> np.void:
    """The head of what was turned round; its addresses, class and checksum are those of an answer."""
    back = world.back
    assert (back[:6], back[6:12]) == (probe[6:12], probe[:6])
    assert (back[22:38], back[38:54]) == (probe[38:54], probe[22:38])
    assert back[18:22] == probe[18:22]  # length, protocol, hops
    covered = back[22:54] + struct.pack(">II", len(back) - _UDP, _NEXT_UDP) + back[_UDP:]
    assert internet_checksum(covered) == 0
    assert back[60:62] != b"\0\0"
    parsed = packets.parse(back[HEADERS_IPV6:], cases.KEYS if world.store.control["tagged"][0] else ())
    assert parsed is not None
    return parsed[0][0]


def test_a_probe_comes_back_with_a_checksum(world: KernelWorld) -> None:
    """kernel-18, kernel-26: whatever the checksum that came, as over veth it was only promised; a mark stays here."""
    for seed in range(8):
        body = random.Random(seed).randbytes(16)
        probe = bytearray(world.frame_of(cases.control_packet(PacketType.PROBE, body, sender=2)))
        probe[60:62] = random.Random(seed).randbytes(2)
        probe[15] |= 0x30  # CE
        assert world.judge(bytes(probe)) == (Verdict.REFLECTED, 2)
        assert world.action == TX
        head = whole_echo(world, bytes(probe))
        assert (head["type"], head["sender"], head["owner"]) == (PacketType.ECHO, cases.RANK, 2)
        assert head["seq"] == seed  # packets of rank 2 that came with CE before
        assert world.back[14:16] == bytes([probe[14], probe[15] & ~0x10])
    assert world.store.peer_states["marked"].tolist()[:4] == [0, 0, 8, 0]
    for length in (0, 32):  # its checksum would be made of other bytes than are there
        wrong = world.frame_of(cases.control_packet(PacketType.PROBE, bytes(length), sender=2))
        assert world.judge(wrong) == (Verdict.BAD_LENGTH, 2)


def test_a_probe_of_a_job_with_a_key(world: KernelWorld) -> None:
    world.arm()
    probe = world.frame_of(cases.tagged(cases.control_packet(PacketType.PROBE, bytes(16), sender=2)))
    assert world.judge(probe) == (Verdict.REFLECTED, 2)
    whole_echo(world, probe)
    assert world.judge(world.frame_of(BODY)) == (Verdict.FORGED, 256)


def test_on_a_vlan(make: Callable[..., KernelWorld]) -> None:
    """Tags are taken off and put back as for IPv4."""
    world = make(ipv6=True, vlan=5)
    tagged = bytes(ETHER / scapy.Dot1Q(vlan=5) / ours() / UDP / BODY)
    assert world.judge(tagged) == (Verdict.STORED, 1)
    control = bytes(ETHER / scapy.Dot1Q(vlan=5) / ours() / UDP / cases.ready())
    assert world.judge(control) == (Verdict.CONTROL_PASSED, 1)
    assert (world.action, world.back) == (PASS, control)


def judged(data: bytes) -> bool | None:
    """Whether a frame is for the job, by its bytes alone, and whether its lengths agree; None: it is not for it."""
    if len(data) < HEADERS_IPV6 or data[12:14] != b"\x86\xdd" or data[_IP] >> 4 != _SIX:
        return None
    length, protocol = struct.unpack_from(">HB", data, _IP + 4)
    port, udp = struct.unpack_from(">HH", data, _UDP + 2)
    own = bytes(scapy.IPv6(dst=OWN, src=PEER))[24:40]
    if protocol != _NEXT_UDP or data[38:54] != own or port != cases.PORT:
        return None
    return length == udp == len(data) - _UDP


def test_damaged_headers(world: KernelWorld) -> None:
    """Random bits in the first 62 bytes, and frames cut short: told apart as a plain reading of the bytes says."""
    rng = random.Random(6)
    whole = world.frame_of(BODY)
    seen = set()
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2))):
            data[rng.randrange(12, HEADERS_IPV6)] ^= 1 << rng.randrange(8)
        if rng.random() < 0.2:
            del data[rng.randrange(14, len(data)) :]
        said, before = judged(bytes(data)), world.ledger()
        world.run(bytes(data))
        gained = world.ledger() - before
        assert gained.sum() == (said is not None), data.hex()
        if said is None:
            assert (world.action, world.back) == (PASS, bytes(data))
        else:
            assert (gained[:, Verdict.BAD_LENGTH].sum() == 1) == (not said), data.hex()
        seen.add(said)
    assert seen == {None, False, True}


def test_frames_are_as_scapy_makes_them() -> None:
    """What these and other tests feed: header and checksum."""
    made = scapy.IPv6(frame(BODY, PEER, OWN, cases.PORT, cases.PORT)[14:])
    same = scapy.IPv6(bytes(ours() / UDP / BODY))
    assert bytes(made) == bytes(same)


@pytest.mark.thorough
@pytest.mark.parametrize("width", [1344, 8832])
def test_verifier(make: Callable[..., KernelWorld], width: int) -> None:
    """As for IPv4 (``test_budget``), but for the widest rows; few have them."""
    found = syscalls.prog_info(make(ipv6=True, width=width).program).verified_insns
    assert 0 < found <= 450_000
