"""The fault program: the same faults as a model in Python, packet for packet; and duplicates through real veths."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cases
from bpf_calls import map_lookup
from kernel_world import DROP, HEADERS, PASS
from tailbound.kernel import syscalls
from tailbound.wire.packets import DTYPES
from tailbound_lab.bench.frames import frame
from tailbound_lab.bench.program_run import run_xdp
from tailbound_lab.lab.fault_program import FaultProgram, FaultSettings, probability

FRAME = frame(bytes(200), cases.ip_of(1), cases.ip_of(0), 9, cases.PORT)
FRAME_IPV6 = frame(bytes(200), cases.ip_of(1, ipv6=True), cases.ip_of(0, ipv6=True), 9, cases.PORT)
#: Ethernet and the IPv6 header.
_UDP_IPV6 = 54


class Model:
    """xorshift64* and a Gilbert-Elliott chain in plain integers."""

    def __init__(self, settings: FaultSettings) -> None:
        self.state = int.from_bytes(settings.record()[:8], "little")
        self.settings = settings
        self.bad = False
        self.last = time.monotonic()

    def draw(self) -> int:
        x = self.state
        x ^= x >> 12
        x ^= x << 25 & 2**64 - 1
        x ^= x >> 27
        self.state = x
        return (x * 0x2545F4914F6CDD1D & 2**64 - 1) >> 32

    def fate(self, size: int) -> tuple[bool, int | None]:
        """Whether the packet is lost, and which bit behind its headers is flipped."""
        s = self.settings
        now, last = time.monotonic(), self.last
        self.last = now
        if now - last > 0.1:  # a silence ends a burst, also one that a busy machine has made
            self.bad = False
        move, lose, _, corrupt, where, _ = (self.draw() for _ in range(6))
        lost = lose < probability(s.loss_bad if self.bad else s.loss_good)
        if move < probability(s.to_good if self.bad else s.to_bad):
            self.bad = not self.bad
        return lost, None if lost or corrupt >= probability(s.corrupt) else where * (size * 8) >> 32


@pytest.fixture
def program(loader: str) -> Iterator[FaultProgram]:
    made = FaultProgram(loader)
    yield made
    made.close()


def as_the_model(
    program: FaultProgram, settings: FaultSettings, times: int, data: bytes, headers: int
) -> tuple[int, int]:
    """Gives ``program`` the frame ``data`` so often, and has each fate compared; how many were lost and damaged."""
    program.set(settings)
    model = Model(settings)
    lost = corrupted = 0
    for i in range(times):
        result = run_xdp(program.program, data)
        gone, bit = model.fate(len(data) - headers)
        assert result.action == (DROP if gone else PASS), i
        want = bytearray(data)
        if bit is not None:
            want[headers + bit // 8] ^= 1 << bit % 8
        assert result.data == bytes(want), i
        lost, corrupted = lost + gone, corrupted + (bit is not None)
    return lost, corrupted


@pytest.mark.parametrize(
    "settings",
    [
        FaultSettings(seed=1, loss_good=0.1, corrupt=0.2, port=cases.PORT),
        FaultSettings(seed=2, loss_good=0.01, loss_bad=0.7, to_bad=0.05, to_good=0.3),
    ],
    ids=["bernoulli", "gilbert-elliott"],
)
def test_as_the_model(program: FaultProgram, settings: FaultSettings) -> None:
    lost, corrupted = as_the_model(program, settings, 2000, FRAME, HEADERS)
    others = dict.fromkeys(("duplicated", "passed", "reordered", "lost_other", "overflowed", "marked"), 0)
    assert program.counts() == {"seen": 2000, "lost": lost, "corrupted": corrupted} | others


def test_only_the_port(program: FaultProgram) -> None:
    """Other traffic is neither hit nor drawn for."""
    program.set(FaultSettings(loss_good=1.0, port=cases.PORT))
    other = frame(bytes(200), cases.ip_of(1), cases.ip_of(0), 9, cases.PORT + 1)
    answer = frame(bytes(200), cases.ip_of(1), cases.ip_of(0), cases.PORT, 9)
    assert run_xdp(program.program, other).action == PASS
    assert run_xdp(program.program, bytes(60)).action == PASS
    assert run_xdp(program.program, answer).action == DROP
    assert {name: n for name, n in program.counts().items() if n} == {"seen": 1, "lost": 1, "passed": 2}


def state_of(program: FaultProgram) -> NDArray[Any]:
    """A copy of ``tb_faults``."""
    dtype = DTYPES["tb_faults"]
    return np.frombuffer(map_lookup(program.maps.fds["faults"], bytes(4), dtype.itemsize), dtype).copy()


def test_a_silence_ends_a_burst(program: FaultProgram) -> None:
    """The chain steps with packets: what waits longer and longer between two would never get out of a burst."""
    program.set(FaultSettings(loss_bad=1.0, to_bad=1.0, to_good=0.0))
    assert [run_xdp(program.program, FRAME).action for _ in range(5)] == [PASS, DROP, DROP, DROP, DROP]
    record = state_of(program)
    assert record["bad"] == 1
    record["last"] -= 100_000_001
    syscalls.map_update(program.maps.fds["faults"], bytes(4), record.tobytes())
    assert [run_xdp(program.program, FRAME).action for _ in range(2)] == [PASS, DROP]


def test_a_port_of_a_slow_link_marks_and_then_drops(program: FaultProgram) -> None:
    """At a byte a millisecond nothing leaves meanwhile: ten frames fit, and from the fifth on they are marked."""
    program.set(FaultSettings(rate=1000, queue=10 * len(FRAME), mark=4 * len(FRAME)))
    ect = bytearray(FRAME)
    ect[15] = 0x2E  # class 11, ECT(0)
    ect[24:26] = (int.from_bytes(ect[24:26], "big") - 0x2E).to_bytes(2, "big")
    results = [run_xdp(program.program, bytes(ect)) for _ in range(12)]
    assert [result.action for result in results] == [PASS] * 10 + [DROP] * 2
    assert [result.data[15] for result in results[:10]] == [0x2E] * 4 + [0x2F] * 6
    for result in results:
        assert sum(int.from_bytes(result.data[i : i + 2], "big") for i in range(14, 34, 2)) % 0xFFFF == 0
    assert (program.counts()["overflowed"], program.counts()["marked"]) == (2, 6)
    program.set(FaultSettings(rate=1000, queue=10 * len(FRAME), mark=1))
    assert run_xdp(program.program, FRAME).data == FRAME  # its sender knows of no marks


def test_marks_of_ipv6_stand_in_the_traffic_class(program: FaultProgram) -> None:
    """From ECT(0) and ECT(1) to CE; class and flow label stay, and what is not ECT."""
    program.set(FaultSettings(rate=1000, queue=1 << 20, mark=1))
    for before, after in ((0x2E, 0x2F), (0x01, 0x03), (0xFF, 0xFF), (0xB8, 0xB8)):
        data = bytearray(FRAME_IPV6)
        data[14:18] = (6 << 28 | before << 20 | 0xABCDE).to_bytes(4, "big")
        want = bytes(data[:14]) + (6 << 28 | after << 20 | 0xABCDE).to_bytes(4, "big") + bytes(data[18:])
        result = run_xdp(program.program, bytes(data))
        assert (result.action, result.data) == (PASS, want)
    assert program.counts()["marked"] == 3


def test_what_of_ipv6_faults_never_hit(program: FaultProgram) -> None:
    """Neighbour discovery, extension headers and what is no IPv6 pass untouched; TCP is lost, and counted apart."""
    scapy = pytest.importorskip("scapy.all", reason="missing capability 'scapy': pip install 'tailbound[test]'")
    ip = scapy.Ether(src="02:7b:00:00:00:01", dst="02:7b:00:00:00:02") / scapy.IPv6(src="fd7b::1", dst="fd7b::2")
    udp, body = scapy.UDP(sport=9, dport=cases.PORT), bytes(64)
    options = (scapy.IPv6ExtHdrHopByHop(), scapy.IPv6ExtHdrDestOpt(), scapy.IPv6ExtHdrRouting())
    passing = [
        *(bytes(ip / header / udp / body) for header in options),
        bytes(ip / scapy.IPv6ExtHdrFragment(m=1) / udp / body),
        bytes(ip / scapy.IPv6ExtHdrFragment(offset=10) / body),
        bytes(ip / scapy.ICMPv6ND_NS(tgt="fd7b::2")),
        bytes(ip / scapy.ICMPv6EchoRequest(data=body)),
        bytes(ip / scapy.IPv6(src="fd7b::1", dst="fd7b::2") / udp / body),  # a tunnel
        FRAME_IPV6[:14] + b"\x45" + FRAME_IPV6[15:],  # says that it is IPv6, and is not
        *(FRAME_IPV6[:size] for size in range(14, _UDP_IPV6 + 8)),
    ]
    program.set(FaultSettings(loss_good=1.0, corrupt=1.0, rate=1000, queue=1 << 20, mark=1))
    for data in passing:
        result = run_xdp(program.program, data)
        assert (result.action, result.data) == (PASS, data), data.hex()
    assert {name: n for name, n in program.counts().items() if n} == {"passed": len(passing)}
    for data in (bytes(ip / udp), bytes(ip / scapy.TCP(dport=cases.PORT)), bytes(ip / udp / body)):
        assert run_xdp(program.program, data).action == DROP
    assert {name: n for name, n in program.counts().items() if n} == {
        "passed": len(passing), "seen": 3, "lost": 3, "lost_other": 1,
    }  # fmt: skip
    program.set(FaultSettings(loss_good=1.0, port=cases.PORT))
    assert run_xdp(program.program, bytes(ip / scapy.TCP(dport=cases.PORT))).action == PASS
    assert run_xdp(program.program, bytes(ip / scapy.UDP(dport=9, sport=9))).action == PASS
    assert run_xdp(program.program, FRAME_IPV6).action == DROP
