"""HOLD is repeated where the transport thread cannot, and only then (clock-16)."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tailbound.collective.holding import Heartbeat
from tailbound.transport.config import MS

PATIENCE = 30.0
PACKETS = [bytes([rank]) * 64 for rank in range(2)]


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    made = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(3)]
    for sock in made:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(PATIENCE)
    yield made
    for sock in made:
        sock.close()


def got(sock: socket.socket) -> bytes:
    """A packet that is there already, or nothing."""
    try:
        return sock.recv(100)
    except BlockingIOError:
        return b""


def heartbeat(sockets: list[socket.socket]) -> Heartbeat:
    return Heartbeat(sockets[0], [sock.getsockname() for sock in sockets[1:]], 64, 5 * MS)


def test_what_is_overdue_is_repeated_to_every_peer_with_its_own_packet(sockets: list[socket.socket]) -> None:
    beat = heartbeat(sockets)
    beat.said(PACKETS, now=0)
    for sock, packet in zip(sockets[1:], PACKETS, strict=True):
        for _ in range(3):
            assert sock.recvfrom(100) == (packet, sockets[0].getsockname())
    beat.stop()
    read = []
    for sock in sockets[1:]:
        sock.setblocking(False)
        read.append(3 + sum(1 for _ in iter(lambda sock=sock: got(sock), b"")))  # with what was on its way
    assert beat.repeated() == read
    assert beat.repeated() == [0, 0]
    assert not any(got(sock) for sock in sockets[1:])


def test_nothing_is_repeated_while_the_transport_thread_speaks_itself(sockets: list[socket.socket]) -> None:
    beat = heartbeat(sockets)
    beat.said(PACKETS, now=1 << 62)
    beat.said([b"x" * 64, b"y" * 64], now=1 << 62)  # later words are those that would be repeated
    beat.stop()
    sockets[1].setblocking(False)
    assert not got(sockets[1])
    beat.said(PACKETS, now=0)  # it can begin anew
    assert sockets[2].recv(100) == PACKETS[1]
    beat.stop()


def test_a_job_of_one_has_nobody_to_tell() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        beat = Heartbeat(sock, [], 64, 5 * MS)
        beat.said([], now=0)
        beat.stop()
