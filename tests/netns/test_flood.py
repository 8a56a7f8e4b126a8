"""A stranger's packets by the thousand: none is taken, each is counted, and no row is lost. Rule: auth-1."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab_team import lab_team
from soak.flood import Target
from support import gradients, patient
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers", "torch")

Make = Callable[..., Cluster]
RANKS, NUMEL, CLASS = 3, 64 * 1408, 11


def test_a_flood_costs_no_row_and_every_packet_is_counted(tailbound_lab: Make, key_file: Path) -> None:
    """A row that rank 0 has, or is about to get, with a bit turned. What leaves has the class that was asked for."""
    lab = tailbound_lab(workers=RANKS)
    settings = patient(width=1408, ring_mib=8.0, key_file=str(key_file), dscp=CLASS)
    port = lab.topology.switch, Link.DATA.port(1)
    with lab_team(lab, settings) as job, Target(lab, job) as target:
        job.allreduce(gradients("U", RANKS, NUMEL, seed=0))
        stop = threading.Event()
        flood = threading.Thread(target=target.stranger.flood, args=(20_000, target.forged, stop))
        with namespaces.call(port[0], _listening, port[1]) as heard:
            flood.start()
            try:
                for op in range(6):
                    results = job.allreduce(gradients("U", RANKS, NUMEL, seed=op))
                    assert all(outcome.delivered == outcome.expected for _, outcome in results)
                    assert len({out.tobytes() for out, _ in results}) == 1
            finally:
                stop.set()
                flood.join()
            classes = set(_classes(heard, lab.spec.port))
        target.stranger.send(target.forged(), 1000)
        arrived, _ = target.stranger.counts()  # beside these the interface's ring had no room for some
        assert arrived > 1000
        target.settled()
        assert target.forged_count() == arrived
        assert [member.stats()["drops"].get("FORGED", 0) for member in job.communicators[1:]] == [0] * (RANKS - 1)
    assert classes == {CLASS}


def _listening(interface: str) -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sock.bind((interface, 0))
    sock.setblocking(False)
    return sock


def _classes(heard: socket.socket, port: int) -> Iterator[int]:
    """Of UDP packets to ``port``."""
    while True:
        try:
            data = heard.recv(2048)
        except BlockingIOError:
            return
        if data[12:14] == b"\x08\x00" and data[23] == socket.IPPROTO_UDP and data[36:38] == port.to_bytes(2, "big"):
            yield data[15] >> 2
