"""Packets that scapy makes, over a real interface, beside an all-reduce in namespaces."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab_team import lab_team
from support import Reference, gradients, patient
from tailbound.wire.schema import PacketType, op_label
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster

if TYPE_CHECKING:
    from scapy.packet import Packet

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers", "scapy")

Make = Callable[..., Cluster]
RANKS, COOKIE, ROUNDS = 3, 21, 50


def mac_of(interface: str) -> bytes:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((interface, 0))
        mac: bytes = sock.getsockname()[4]
        return mac


def rubbish(lab: Cluster, label: int) -> dict[str, list[bytes]]:
    """Frames from worker 1 to worker 0 by the verdict that refuses them."""
    from scapy.layers.inet import IP, UDP
    from scapy.layers.l2 import Ether
    from scapy.packet import Raw

    from scapy_layer import Tailbound

    draw, (target, source) = random.Random(11), lab.workers[:2]
    mac = namespaces.call(target.namespace, mac_of, target.interface)
    row = {"type": int(PacketType.CONTRIBUTION), "cookie": COOKIE, "sender": 1, "op": label, "seq": 3, "row": 3}
    good = bytes(Tailbound(**row) / Raw(bytes([128]) * 256))

    def frame(body: Packet, address: str = source.address) -> bytes:
        ends = Ether(dst=mac, src=b"\x02\0\0\0\0\1") / IP(src=address, dst=target.address)
        return bytes(ends / UDP(sport=1024, dport=lab.spec.port) / body)

    def damaged() -> bytes:
        data = bytearray(good)
        data[draw.randrange(64, len(data))] ^= 1 << draw.randrange(8)
        return bytes(data)

    return {
        "BAD_LENGTH": [frame(Raw(good[: draw.randrange(64)])) for _ in range(ROUNDS)],
        "CORRUPT": [frame(Raw(damaged())) for _ in range(ROUNDS)],
        "WRONG_COOKIE": [frame(Tailbound(**row | {"cookie": COOKIE + 1 + i}) / Raw(good[64:])) for i in range(ROUNDS)],
        "WRONG_ADDRESS": [frame(Raw(good), f"198.19.0.{i}") for i in range(ROUNDS)],
    }


def send(interface: str, frames: list[bytes]) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((interface, 0))
        for frame in frames:
            sock.send(frame)


def test_what_scapy_forges_is_refused_by_name_and_changes_no_bit(tailbound_lab: Make) -> None:
    """Rows of the same op arrive beside frames that are cut, damaged, of another job or from another address."""
    lab, expected = tailbound_lab(workers=RANKS), Reference(RANKS, 1408, COOKIE)
    with lab_team(lab, patient(width=1408, ring_mib=8.0, share_rows=False), cookie=COOKIE) as job:
        for op in range(4):
            frames = rubbish(lab, op_label(op, 0))
            for kind in frames.values():
                lab.run(1, partial(send, lab.workers[1].interface, kind))
            inputs = gradients("U", RANKS, 50_000, seed=op)
            wanted = expected.allreduce(inputs, op_label(op, 0))
            for out, outcome in job.allreduce(inputs):
                assert outcome.delivered == outcome.expected
                np.testing.assert_array_equal(out.view(np.uint32), wanted.view(np.uint32))
        drops = job[0].stats()["drops"]
    assert {name: drops.get(name, 0) for name in frames} == dict.fromkeys(frames, 4 * ROUNDS)
