"""What is not ours passes untouched and is not counted."""

from __future__ import annotations

import itertools

import pytest

import cases
from kernel_world import DROP, PASS
from tailbound.wire.schema import Verdict

scapy = pytest.importorskip("scapy.all", reason="missing capability 'scapy': pip install 'tailbound[test]'")

OURS = {"src": cases.ip_of(1), "dst": cases.ip_of(cases.RANK)}
BODY = cases.contribution()
#: With addresses: else scapy asks the network for them.
ETHER = scapy.Ether(src="02:7b:00:00:00:01", dst="02:7b:00:00:00:02")
TAG = ETHER / scapy.Dot1Q(vlan=5)
UDP = scapy.UDP(sport=cases.PORT, dport=cases.PORT)

FOREIGN = {
    "ARP": ETHER / scapy.ARP(pdst=OURS["dst"]),
    "IPv6": ETHER / scapy.IPv6(src="fd00::1", dst="fd00::2") / UDP / BODY,
    "TCP to our port": ETHER / scapy.IP(**OURS) / scapy.TCP(dport=cases.PORT) / BODY,
    "ICMP": ETHER / scapy.IP(**OURS) / scapy.ICMP() / BODY,
    "another UDP port": ETHER / scapy.IP(**OURS) / scapy.UDP(dport=cases.PORT + 1) / BODY,
    "our port as source only": ETHER / scapy.IP(**OURS) / scapy.UDP(sport=cases.PORT, dport=9) / BODY,
    "VLAN": TAG / scapy.IP(**OURS) / UDP / BODY,
    "IP options": ETHER / scapy.IP(**OURS, options=scapy.IPOption(b"\x94\x04\0\0")) / UDP / BODY,
    "first fragment": ETHER / scapy.IP(**OURS, flags="MF") / UDP / BODY,
    "last fragment": ETHER / scapy.IP(**OURS, frag=64) / UDP / BODY,
    "IPv4 by its type, not by its version": ETHER / scapy.IP(**OURS, version=5) / UDP / BODY,
    "a frame of 14 bytes": scapy.Ether(src=ETHER.src, dst=ETHER.dst, type=0x0800),
    "a frame that ends inside UDP": scapy.Ether(src=ETHER.src, dst=ETHER.dst, type=0x0800)
    / scapy.Raw(bytes(scapy.IP(**OURS) / UDP)[:26]),
}


#: UDP to our port, but for somebody else: a guest behind a bridge, or what a switch has flooded.
OTHERS = {"a neighbour": cases.ip_of(2), "a group": "239.192.7.7", "everybody": "255.255.255.255", "nobody": "0.0.0.1"}
FOREIGN |= {
    f"our port at the address of {who}": ETHER / scapy.IP(src=cases.ip_of(1), dst=address) / UDP / BODY
    for who, address in OTHERS.items()
}
FOREIGN["our port at another address, too short for a packet"] = (
    ETHER / scapy.IP(src=cases.ip_of(1), dst=cases.ip_of(2)) / UDP / b"?"
)


@pytest.mark.parametrize("job", ["a job", "no job", "no address either"])
def test_passes_untouched(make, job: str) -> None:
    """Rule: kernel-1."""
    world = make()
    if job != "a job":
        world.control(active=0)
    if job == "no address either":
        world.control(address=0)
    for name, packet in FOREIGN.items():
        data = bytes(packet)
        assert world.run(data) == PASS, name
        assert world.back == data, name
        assert not world.ledger().any(), name
        assert not world.store.ops["op"].any(), name


def test_the_same_from_scapy_is_ours(make) -> None:
    """The control: with nothing odd about it, the packet is taken."""
    world = make()
    data = bytes(ETHER / scapy.IP(**OURS) / UDP / BODY)
    assert world.judge(data) == (Verdict.STORED, 1)
    assert world.action == DROP


@pytest.mark.parametrize(("active", "verdict"), [(1, Verdict.STORED), (0, Verdict.INACTIVE)])
def test_to_the_group_is_ours(make, active: int, verdict: Verdict) -> None:
    """A group of the job's is; any other group is somebody else's (kernel-1)."""
    world = make()
    group = ETHER / scapy.IP(src=cases.ip_of(1), dst="239.192.7.7") / UDP / BODY
    world.control(group=int.from_bytes(bytes([239, 192, 7, 7]), "little"), active=active)
    assert world.judge(bytes(group))[0] == verdict
    world.control(group=int.from_bytes(bytes([239, 192, 7, 8]), "little"))
    assert world.run(bytes(group)) == PASS


def test_without_a_job_our_port_is_ours(make) -> None:
    """The address is known from the attach on: a packet that comes before the job, or after it, is counted.

    Rule: kernel-5.
    """
    world = make()
    world.control(active=0)
    data = bytes(ETHER / scapy.IP(**OURS) / UDP / BODY)
    assert world.judge(data) == (Verdict.INACTIVE, 256)
    assert world.action == DROP


def test_lengths_that_disagree(make) -> None:
    """Rule: kernel-2."""
    world = make()
    for wrong, by in itertools.product(("ip", "udp", "frame"), (-16, -1, 1, 16)):
        ip, udp, frame = (by if wrong == name else 0 for name in ("ip", "udp", "frame"))
        packet = scapy.IP(**OURS, len=28 + len(BODY) + ip) / scapy.UDP(
            sport=cases.PORT, dport=cases.PORT, len=8 + len(BODY) + udp
        )
        data = bytes(ETHER / packet / BODY)
        data = data[:frame] if frame < 0 else data + bytes(frame)
        assert world.judge(data) == (Verdict.BAD_LENGTH, 256), (wrong, by)
