"""The switch's program for jobs over IPv6: the same list behind another header, and checksums that hold (kernel-24)."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable

import pytest

import switch_cases
from hostile import damaged
from kernel_world import KernelWorld
from loaders import loader as loader
from switch_cases import CASES, JOB, Job, Step, contribution, expected, in_ipv6
from switch_world import DROP, HEADERS, HEADERS_IPV6, PASS, REDIRECT, SwitchWorld, entry_of, mac_bytes
from tailbound.errors import ConfigError
from tailbound.kernel.frames import frame, internet_checksum
from tailbound.switch.job import RankSpec, parse_rank
from tailbound.wire import packets
from tailbound.wire.schema import PacketType, Verdict

scapy = pytest.importorskip("scapy.all", reason="missing capability 'scapy': pip install 'tailbound[test]'")

Make = Callable[..., SwitchWorld]
_SOURCE, _DESTINATION, _UDP = 22, 38, 54


@pytest.fixture
def world(make_switch: Make) -> SwitchWorld:
    return make_switch(ipv6=True)


def raw(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6, in_ipv6(address))


def summed(data: bytes) -> int:
    """The checksum of all that UDP's covers with that in it: 0 where it is right."""
    udp = data[_UDP:]
    covered = data[_SOURCE:_UDP] + len(udp).to_bytes(4) + bytes(3) + b"\x11" + udp
    return internet_checksum(covered + bytes(len(covered) % 2))


def check_step(world: SwitchWorld, step: Step) -> None:
    before = world.frame_of(step)
    counted = world.feed(step)
    if step.verdict is None:
        assert (world.action, world.back, counted) == (PASS, before, {})
        return
    place = world.places.get(step.job.cookie, 0)
    want = {(place, step.sender, step.verdict): 1}
    if step.abandoned:
        want[place, step.sender, Verdict.ABANDONED] = step.abandoned
    assert counted == want
    sent = expected(step, "mean")
    if sent is None:
        assert (world.action, world.back) == (DROP, before)
        return
    assert (world.action, world.back[0]) == (REDIRECT, place)
    assert world.back[HEADERS_IPV6:] == sent
    assert world.back[6:12] == mac_bytes(switch_cases.MAC)
    assert world.back[_SOURCE:_DESTINATION] == raw(step.job.address)
    assert world.back[_UDP : _UDP + 4] == step.job.port.to_bytes(2) * 2
    assert world.back[_UDP + 6 : _UDP + 8] != bytes(2)
    assert summed(world.back) == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(make_switch: Make, case: switch_cases.Case) -> None:
    world = make_switch(case.jobs, ipv6=True)
    for step in case.steps:
        check_step(world, step)


@pytest.mark.parametrize("codes", [16, 48, 112, 1328, 1344])
def test_checksums_of_all_lengths(make_switch: Make, codes: int) -> None:
    world = make_switch(width=256 if codes <= 256 else 1344, ipv6=True)
    a, b, c = (contribution(rank, codes) for rank in range(3))
    for step in (
        Step(a, Verdict.STORED, 0),
        Step(b, Verdict.ADDED, 1),
        Step(c, Verdict.ADDED, 2, (a, b, c), (0, 1, 2)),
        Step(b, Verdict.ANSWERED, 1, (a, b, c), (1,)),
    ):
        check_step(world, step)


def test_copies_are_readdressed_with_their_checksum(world: SwitchWorld) -> None:
    """What the device map's program does to a copy, and to the echo of a probe that has its address already."""
    probe = contribution(1, 16, type=PacketType.PROBE)
    for _ in range(2):
        assert world.feed(Step(probe, Verdict.REFLECTED, 1)) == {(0, 1, Verdict.REFLECTED): 1}
    assert (world.action, summed(world.back)) == (REDIRECT, 0)
    assert world.back[_SOURCE:_UDP] == raw(JOB.address) + raw(switch_cases.ip_of(1))
    head, _ = packets.parse(world.back[HEADERS_IPV6:])  # type: ignore[misc]
    assert (head["type"][0], head["sender"][0], head["owner"][0]) == (PacketType.ECHO, JOB.ranks, 1)
    long = contribution(1, 32, type=PacketType.PROBE)
    assert world.feed(Step(long, Verdict.BAD_LENGTH, 1)) == {(0, 1, Verdict.BAD_LENGTH): 1}
    assert world.action == DROP


def test_all_128_bits_count(world: SwitchWorld) -> None:
    """A source with any other bit is another's, a destination with any other bit is not the switch."""
    data = world.frame_of(Step(contribution(0), None))
    for at, verdict in ((_SOURCE, {Verdict.WRONG_ADDRESS: 1}), (_DESTINATION, {})):
        for bit in range(128):
            other = bytearray(data)
            other[at + bit // 8] ^= 1 << bit % 8
            world.begin()
            world.run(bytes(other))
            assert world.counted() == verdict, bit
            assert world.action == (DROP if verdict else PASS)
    world.run(data)
    assert world.counted() == {Verdict.STORED: 1}


def test_entries_are_read_back(world: SwitchWorld) -> None:
    partly = Job(ranks=3, registered=(0, 2))
    world.begin((partly,))
    assert world.switch.entries() == {0: entry_of(partly, ipv6=True)}


def test_what_is_not_ours_passes_and_what_is_malformed_is_refused(world: SwitchWorld) -> None:
    """Extension headers, fragments, IPv4, cut headers: untouched, not counted. Lengths that lie: dropped."""
    step = Step(contribution(0), None)
    ip = scapy.Ether(src="02:7b:00:00:00:01", dst="02:7b:00:00:00:02") / scapy.IPv6(
        src=in_ipv6(step.source_address), dst=in_ipv6(step.destination)
    )
    udp, data = scapy.UDP(sport=step.port, dport=step.port) / step.packet, world.frame_of(step)
    passing = [
        *(bytes(ip / header / udp) for header in (scapy.IPv6ExtHdrHopByHop(), scapy.IPv6ExtHdrDestOpt())),
        bytes(ip / scapy.IPv6ExtHdrRouting() / udp),
        bytes(ip / scapy.IPv6ExtHdrFragment(m=1) / udp),
        bytes(ip / scapy.TCP(dport=step.port) / step.packet),
        bytes(ip / scapy.ICMPv6ND_NS(tgt=in_ipv6(step.destination))),
        frame(step.packet, step.source_address, step.destination, step.port, step.port),
        data[:14] + b"\x45" + data[15:],
        *(data[:size] for size in range(14, HEADERS_IPV6)),
    ]
    for foreign in passing:
        world.run(foreign)
        assert (world.action, world.back) == (PASS, foreign), foreign.hex()
    assert world.counted() == {}
    lies = [data[:-16], data + bytes(16), data[:18] + bytes(2) + data[20:], data[:58] + bytes(2) + data[60:]]
    for number, lie in enumerate(lies, 1):
        world.run(lie)
        assert (world.action, world.counted()) == (DROP, {Verdict.BAD_LENGTH: number})


def test_damage_is_never_summed(world: SwitchWorld) -> None:
    rng = random.Random(24)
    sent = [contribution(rank) for rank in range(3)]
    step = Step(sent[0], None)
    bare = [frame(packet, step.source_address, step.destination, step.port, step.port) for packet in sent]
    source, there = in_ipv6(step.source_address), in_ipv6(step.destination)
    for rank, packet in enumerate(sent):
        for _ in range(400):
            data = frame(damaged(rng, bare)[HEADERS:], source, there, step.port, step.port)
            world.run(data[: rng.choice((len(data), rng.randrange(14, len(data))))])
            assert world.action in (PASS, DROP)
        verdict = Verdict.ADDED if rank else Verdict.STORED
        done = tuple(sent) if rank == 2 else ()
        check_step(world, Step(packet, verdict, rank, done, (0, 1, 2) if done else ()))


def test_a_worker_takes_the_result(make_switch: Make, make: Callable[..., KernelWorld]) -> None:
    """The worker's program for IPv6 takes what the switch sends as a rank's."""
    worker = switch_cases.worker
    job = Job(ranks=worker.RANKS - 1)
    switch, receiver = make_switch((job,), ipv6=True), make(ipv6=True)
    seq = worker.RESULT_BASE + 9
    sent = [contribution(rank, job=job, seq=seq, map_id=worker.MAP_ID) for rank in range(job.ranks)]
    for packet in sent:
        switch.feed(Step(packet, None, job=job, destination=job.address))
    assert receiver.take(switch.back[HEADERS_IPV6:]) == (Verdict.RESULT_TAKEN, job.ranks)
    codes = receiver.store.results[seq % worker.RESULT_ROWS, : switch_cases.CODES].tobytes()
    assert codes == switch_cases.mean(switch_cases.sums(sent), job.ranks)


def test_addresses_that_nobody_can_have_are_refused() -> None:
    assert parse_rank("FD00:0::1, 02:7b:00:00:00:01,eth1").address == "fd00::1"
    for address in ("::1", "::ffff:10.0.0.1", "fe80::1%eth0", "fd00::g", "10.0.0"):
        with pytest.raises(ConfigError, match="address"):
            RankSpec(address, "02:7b:00:00:00:01", "eth1")
