"""A job on a VLAN: tags are taken off and put back, and everything else on the device passes as it came (kernel-1)."""

from __future__ import annotations

import pytest

import bare_cases
import cases
from kernel_world import DROP, PASS, TX, KernelWorld
from tailbound.kernel import syscalls
from tailbound.transport.config import WIDTH_MOST
from tailbound.wire.packets import parse
from tailbound.wire.schema import Flag, PacketType, Tagging, Verdict

scapy = pytest.importorskip("scapy.all", reason="missing capability 'scapy': pip install 'tailbound[test]'")

VLAN = 5
SOURCE, OWN = "02:7b:00:00:00:01", "02:7b:00:00:00:02"
IP = {"src": cases.ip_of(1), "dst": cases.ip_of(cases.RANK)}


def frame(body: bytes, *tags: int, priority: int = 0, port: int = cases.PORT, sender: int = 1) -> bytes:
    """A frame from a rank with ``tags`` of VLANs, the outermost first."""
    packet = scapy.Ether(src=SOURCE, dst=OWN)
    for tag in tags:
        packet /= scapy.Dot1Q(vlan=tag, prio=priority)
    return bytes(
        packet / scapy.IP(src=cases.ip_of(sender), dst=IP["dst"]) / scapy.UDP(sport=cases.PORT, dport=port) / body
    )


@pytest.fixture
def world(make) -> KernelWorld:
    """A job on the VLAN."""
    made: KernelWorld = make(vlan=VLAN)
    return made


@pytest.mark.parametrize("tags", [(VLAN,), ()], ids=["tagged", "stripped"])
def test_rows_are_summed(world: KernelWorld, tags: tuple[int, ...]) -> None:
    """With the tag of the VLAN, and without: the NIC may have stripped it."""
    assert world.judge(frame(cases.contribution(), *tags)) == (Verdict.STORED, 1)
    assert world.action == DROP
    assert world.judge(frame(cases.contribution(sender=2), *tags))[0] is Verdict.WRONG_ADDRESS


@pytest.mark.parametrize("tags", [(VLAN,), ()], ids=["tagged", "stripped"])
def test_control_packets_pass_as_they_came(world: KernelWorld, tags: tuple[int, ...]) -> None:
    """Tag, priority and all: the stack hands them to the interface of the VLAN."""
    data = frame(cases.ready(), *tags, priority=6)
    assert world.judge(data) == (Verdict.CONTROL_PASSED, 1)
    assert (world.action, world.back) == (PASS, data)


@pytest.mark.parametrize("tags", [(VLAN,), ()], ids=["tagged", "stripped"])
def test_probes_are_turned_round_into_the_vlan(world: KernelWorld, tags: tuple[int, ...]) -> None:
    """Nobody tags what XDP sends, so an echo has a tag even where the probe had lost its own."""
    world.judge(frame(cases.control_packet(PacketType.PROBE, bytes(32)), *tags, priority=3))
    echo = scapy.Ether(world.back)
    assert world.action == TX
    assert (echo.src, echo.dst) == (OWN, SOURCE)
    assert (echo[scapy.Dot1Q].vlan, echo[scapy.Dot1Q].prio) == (VLAN, 3 if tags else 0)
    assert (echo[scapy.IP].src, echo[scapy.IP].dst) == (IP["dst"], IP["src"])
    found = parse(bytes(echo[scapy.UDP].payload))
    assert found is not None
    assert found[0]["type"] == PacketType.ECHO


def test_others_pass_untouched(world: KernelWorld) -> None:
    """Other VLANs, tags in tags, what is not for the job's port, and frames that end too early."""
    body = cases.contribution()
    others = {
        "another VLAN": frame(body, VLAN + 1),
        "two tags": frame(body, VLAN, VLAN),
        "the VLAN inside another": frame(body, VLAN + 1, VLAN),
        "another port": frame(body, VLAN, port=cases.PORT + 1, priority=7),
        "a service tag": bytes(scapy.Ether(src=SOURCE, dst=OWN, type=0x88A8) / scapy.Raw(frame(body, VLAN)[14:])),
        "ARP": bytes(scapy.Ether(src=SOURCE, dst=OWN) / scapy.Dot1Q(vlan=VLAN) / scapy.ARP(pdst=IP["dst"])),
        **{f"{size} bytes": frame(body, VLAN)[:size] for size in (14, 17, 18, 30, 45)},
    }
    for name, data in others.items():
        assert world.run(data) == PASS, name
        assert world.back == data, name
    assert not world.ledger().any()


def test_lengths_are_those_of_the_frame_without_its_tag(world: KernelWorld) -> None:
    """Bytes behind the IP packet are refused with a tag as without one (kernel-2)."""
    assert world.judge(frame(cases.contribution(), VLAN) + bytes(4)) == (Verdict.BAD_LENGTH, 256)


PRIORITY = 0


def test_a_priority_without_a_vlan_is_no_tag(make) -> None:
    """Fabrics with priority flow control send them. The stack sees the same packet; what is not ours keeps its tag.

    Rule: kernel-1.
    """
    world: KernelWorld = make()
    body = cases.contribution()
    assert world.judge(frame(body, PRIORITY, priority=5)) == (Verdict.STORED, 1)
    assert world.judge(frame(cases.ready(), PRIORITY, priority=5)) == (Verdict.CONTROL_PASSED, 1)
    assert (world.action, world.back) == (PASS, frame(cases.ready()))
    assert world.judge(frame(cases.control_packet(PacketType.PROBE, bytes(32)), PRIORITY))[0] == Verdict.REFLECTED
    assert parse(world.back[42:]) is not None
    before = world.ledger()
    others = {
        "another port": frame(body, PRIORITY, port=cases.PORT + 1, priority=7),
        "a VLAN": frame(body, VLAN),
        "a VLAN inside": frame(body, PRIORITY, VLAN),
        "ARP": bytes(scapy.Ether(src=SOURCE, dst=OWN) / scapy.Dot1Q(vlan=0, prio=3) / scapy.ARP(pdst=IP["dst"])),
        **{f"{size} bytes": frame(body, PRIORITY)[:size] for size in (14, 17, 18, 30, 45)},
    }
    for name, data in others.items():
        assert world.run(data) == PASS, name
        assert world.back == data, name
    assert (world.ledger() == before).all()


@pytest.mark.parametrize("width", [1408, WIDTH_MOST])
def test_verifier(make, width: int) -> None:
    """It follows the program once for frames with a tag and those without: Linux 5.19 has no room for twice."""
    tagged, plain = (syscalls.prog_info(make(width=width, vlan=vlan).program).verified_insns for vlan in (VLAN, 0))
    assert 0 < tagged < 1.5 * plain


def test_a_job_with_a_key(world: KernelWorld) -> None:
    """The program for tags of keys takes those of VLANs off and puts them back, too (auth-2)."""
    world.arm()
    assert world.judge(frame(cases.tagged(cases.contribution()), VLAN)) == (Verdict.STORED, 1)
    assert world.judge(frame(cases.contribution(), VLAN)) == (Verdict.FORGED, 256)
    world.control(tagged=int(Tagging.ON | Tagging.BARE))
    for seq, tags in enumerate(((VLAN,), ())):
        row = cases.result(bare_cases.SWITCH, flags=Flag.SWITCHED, seq=cases.RESULT_SEQ + seq)
        assert world.judge(frame(row, *tags, sender=bare_cases.SWITCH)) == (Verdict.RESULT_TAKEN, bare_cases.SWITCH)
    data = frame(cases.tagged(cases.ready()), VLAN, priority=6)
    assert world.judge(data) == (Verdict.CONTROL_PASSED, 1)
    assert (world.action, world.back) == (PASS, data)
