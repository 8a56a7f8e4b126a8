"""The P4 switch in bmv2 between two namespaces: frames in and out of its ports, and the world of ``switch_cases``.

bmv2 has one queue into the pipeline and one for each port out of it. So a frame that follows another one through the
same port and comes out everywhere, a fence, is behind all that the other one has caused: nothing here waits for time to
pass.
"""

from __future__ import annotations

import itertools
import select
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

import switch_cases
import veths
from switch_world import entry_of
from tailbound.switch.job import mac_bytes
from tailbound.switch.p4 import commands
from tailbound.switch.p4.compile import Sizes
from tailbound.switch.p4.switch import P4Switch
from tailbound.wire.schema import UNKNOWN_SENDER, Verdict
from tailbound_lab.bench.frames import frame, internet_checksum
from tailbound_lab.lab import namespaces

PORTS = 4
SIZES = Sizes(slots=512, jobs=2, ranks=8, ports=8)
#: Ethernet, IPv4, UDP.
HEADERS = 42
#: Seconds until a fence must be back; only a failing test waits for it.
PATIENCE = 20.0
_ETH_P_ALL = 0x0003
_FENCE = bytes.fromhex("88b5")  # an experiment's EtherType (IEEE 802)
_BROADCAST = b"\xff" * 6


def frame_of(step: switch_cases.Step, port: int) -> bytes:
    """The step's packet as a frame that enters at ``port``."""
    ranks = {switch_cases.ip_of(rank): mac_bytes(switch_cases.mac_of(rank)) for rank in range(PORTS)}
    to = ranks.get(step.destination, mac_bytes(switch_cases.MAC))
    plain = frame(step.packet, step.source_address, step.destination, step.port, step.port)
    return to + mac_bytes(switch_cases.mac_of(port)) + plain[12:]


class World:
    """A switch with ``PORTS`` ports, and a raw socket at the other end of each."""

    def __init__(self, switch: P4Switch, sockets: Sequence[socket.socket]) -> None:
        self.switch = switch
        self._sockets = sockets
        self._fences = itertools.count()

    def feed(self, port: int, data: bytes) -> dict[int, list[bytes]]:
        """Sends a frame into ``port``; port -> frames that came out of it because of that."""
        number = next(self._fences).to_bytes(8, "big")
        own = mac_bytes(switch_cases.mac_of(port))
        fences = [to + own + _FENCE + number + bytes(40) for to in (_BROADCAST, own)]
        for each in (data, *fences):
            self._sockets[port].send(each)
        return {at: frames for at in range(PORTS) if (frames := self._until(at, number))}

    def _until(self, port: int, number: bytes) -> list[bytes]:
        frames: list[bytes] = []
        while True:
            ready, _, _ = select.select([self._sockets[port]], [], [], PATIENCE)
            assert ready, f"no fence out of port {port}, after {len(frames)} frames"
            data = self._sockets[port].recv(1 << 16)
            if data[12:14] != _FENCE:
                frames.append(data)
            elif data[14:22] == number:
                return frames

    @contextmanager
    def jobs(self, jobs: Sequence[switch_cases.Job], ports: Sequence[int] = range(SIZES.ranks + 1)) -> Iterator[None]:
        """The jobs installed in empty slots, counters at zero; ``ports`` of their ranks."""
        forget(self.switch)
        self.switch.runtime.run(f"register_reset {commands.LEDGER}")
        for place, job in enumerate(jobs):
            self.switch.put(place, entry_of(job, ports))
        try:
            yield
        finally:
            empty(self.switch, range(len(jobs)))

    def ledgers(self, jobs: Sequence[switch_cases.Job]) -> NDArray[np.int64]:
        """Counters by place, sender (unknown last) and verdict."""
        return np.stack([self.switch.ledger(place) for place in range(len(jobs))])


def empty(switch: P4Switch, places: Iterable[int]) -> None:
    """Takes all jobs out, which lie in ``places``."""
    admit = f"{commands.INGRESS}.admit"
    tables = (f"{admit}.jobs", f"{admit}.senders", f"{admit}.services", f"{commands.EGRESS}.receivers")
    cleared = [f"table_clear {name}" for name in (*tables, f"{commands.INGRESS}.forward.neighbours")]
    switch.runtime.run_all([*cleared, *(f"mc_mgrp_destroy {commands.JOB_GROUP + place}" for place in places)])
    switch._entries.clear()
    switch._known.clear()


def forget(switch: P4Switch) -> None:
    """Empties all slots, as a restart of the switch would; jobs and forwarding stay."""
    switch.runtime.run_all(f"register_reset {name}" for name in commands.SLOT_STATE)


def lose(switch: P4Switch, port: int, way: str, probability: float, seed: int) -> None:
    """Loses packets of jobs at a port, ``in`` or ``out`` of the switch, by a generator that starts at ``seed``."""
    drops = f"{ {'in': commands.INGRESS, 'out': commands.EGRESS}[way] }.drops"
    limit = min(int(probability * (1 << 32)), (1 << 32) - 1)
    switch.runtime.run_all(
        [f"register_write {drops}.state {port} {seed}", f"register_write {drops}.loss {port} {limit}"]
    )


def results(frames: dict[int, list[bytes]], job: switch_cases.Job) -> dict[int, bytes]:
    """Port -> UDP payload of its one frame, with everything before it as a result of ``job`` must have it."""
    payloads = {}
    for port, (data,) in frames.items():
        to, ip, udp = switch_cases.ip_of(port), data[14:34], data[34:42]
        assert data[:14] == mac_bytes(switch_cases.mac_of(port)) + mac_bytes(switch_cases.MAC) + b"\x08\x00"
        assert (socket.inet_ntoa(ip[12:16]), socket.inet_ntoa(ip[16:20])) == (job.address, to)
        assert internet_checksum(ip[:10] + bytes(2) + ip[12:]) == int.from_bytes(ip[10:12], "big")
        assert int.from_bytes(ip[2:4], "big") == len(data) - 14
        lengths = (job.port, job.port, len(data) - 34, 0)
        assert tuple(int.from_bytes(udp[i : i + 2], "big") for i in range(0, 8, 2)) == lengths
        payloads[port] = data[HEADERS:]
    return payloads


def play(world: World, jobs: Sequence[switch_cases.Job], step: switch_cases.Step) -> None:
    """Feeds a step and holds what comes out, and what is counted, against it."""
    sender = step.packet[14] if len(step.packet) > 14 else 0
    port = sender if sender < PORTS else 0
    data = frame_of(step, port)
    before = world.ledgers(jobs)
    out = world.feed(port, data)
    change = world.ledgers(jobs) - before
    if step.verdict is None:
        named = [rank for rank in range(PORTS) if switch_cases.ip_of(rank) == step.destination]
        assert out == {at: [data] for at in named or set(range(PORTS)) - {port}}
        assert not change.any()
        return
    wanted = np.zeros_like(change)
    row = SIZES.ranks if step.sender == UNKNOWN_SENDER else step.sender
    place = [job.cookie for job in jobs].index(step.job.cookie)
    wanted[place, row, step.verdict] += 1
    wanted[place, row, Verdict.ABANDONED] += step.abandoned
    counted = [(int(p), int(s), Verdict(v).name) for p, s, v in np.argwhere(change)]
    assert np.array_equal(change, wanted), f"{step.verdict.name} of {row} expected, counted: {counted}"
    made = switch_cases.expected(step, "sums")
    assert results(out, step.job) == ({} if made is None else dict.fromkeys(step.to, made))


@contextmanager
def world(sizes: Sizes = SIZES) -> Iterator[World]:
    """A running switch."""
    with veths.star(PORTS) as (hub, ends):
        names = {port: f"port{port}" for port in range(PORTS)}
        switch = namespaces.call(hub, P4Switch, names, sizes)
        sockets = [namespaces.call(end, _raw, "data0") for end in ends]
        try:
            switch.connect({mac_bytes(switch_cases.mac_of(port)): port for port in range(PORTS)}, range(PORTS))
            yield World(switch, sockets)
        finally:
            for each in sockets:
                each.close()
            switch.close()


def _raw(interface: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    made.bind((interface, _ETH_P_ALL))
    return made
