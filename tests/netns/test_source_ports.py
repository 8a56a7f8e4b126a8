"""Source ports of bursts between namespaces: what a receiver's hash goes by, and that its queues share the work."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from lab_team import lab_team
from support import gradients, patient
from tailbound.transport.sockets import reserve
from tailbound.wire.schema import PacketType
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

Make = Callable[..., Cluster]
OPS, PORT = 3, 5515
WIDE: dict[str, Any] = {"width": 1408, "ring_mib": 8.0, "share_rows": False}
#: Ethernet, IPv4 and UDP headers, and the type in ours.
_UDP, _TYPE = 34, 42 + 1
_ROWS = (PacketType.CONTRIBUTION, PacketType.RESULT)


@contextmanager
def passing(lab: Cluster, rank: int) -> Iterator[Callable[[], dict[PacketType, set[tuple[str, int]]]]]:
    """Listens at the switch's port to ``rank``; call what it yields for the sources of rows by their type."""
    sock = namespaces.call(lab.topology.switch, socket.socket, socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    reserve(sock, socket.SO_RCVBUF, 256 << 20)
    sock.bind((Link.DATA.port(rank), 0))
    sock.setblocking(False)

    def sources() -> dict[PacketType, set[tuple[str, int]]]:
        found: dict[PacketType, set[tuple[str, int]]] = {kind: set() for kind in _ROWS}
        while True:
            try:
                data, (_, _, direction, *_) = sock.recvfrom(128)
            except BlockingIOError:
                return found
            source, to = struct.unpack_from(">HH", data, _UDP)
            if direction == socket.PACKET_OUTGOING and to == lab.spec.port and data[_TYPE] in _ROWS:
                found[PacketType(data[_TYPE])].add((socket.inet_ntoa(data[26:30]), source))

    with sock:
        yield sources


def run(lab: Cluster, bursts: int, **settings: Any) -> list[str]:
    """A few all-reduces of so many bursts of 45 packets; which way results went."""
    ranks = len(lab.workers)
    inputs = [np.tile(each, bursts) for each in gradients("U", ranks, 45 * 1408, seed=1)]
    with lab_team(lab, patient(**WIDE, **settings)) as job:
        for _ in range(OPS):
            for _, outcome in job.allreduce(inputs):
                assert outcome.delivered == outcome.expected
        for member in job.communicators:
            assert not set(member.stats()["drops"]) - {"STALE_RESULT"}
        return [member.stats()["choice"]["result"] for member in job.communicators]


@pytest.mark.parametrize(("settings", "ports"), [({}, 4), ({"source_ports": 1}, 1)], ids=["four", "one"])
def test_rows_come_from_several_ports(tailbound_lab: Make, settings: dict[str, Any], ports: int) -> None:
    """Rule: kernel-8."""
    lab = tailbound_lab(workers=2, wire=True)
    with passing(lab, 0) as sources:
        run(lab, 2 * 24, **settings)  # 24 bursts for each peer: enough calls for every port
        for kind, found in sources().items():
            assert len({port for address, port in found if address == lab.workers[1].address}) == ports, kind
