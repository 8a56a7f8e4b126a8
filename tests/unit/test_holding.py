"""HOLD is repeated where the transport thread cannot, and only then (clock-16)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tailbound.collective.holding import Heartbeat
from tailbound.transport.config import MS

PATIENCE = 30.0
PACKETS = [bytes([rank]) * 64 for rank in range(2)]


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as opened:
        made = [opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(3)]
        for sock in made:
            sock.bind(("127.0.0.1", 0))
        yield made


def got(sock: socket.socket) -> bytes:
    """A packet that is there already, or nothing."""
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return sock.recv(100)
    return b""


def test_a_hold_is_repeated_to_every_peer_while_the_transport_thread_cannot_and_only_then(
    sockets: list[socket.socket],
) -> None:
    beat = Heartbeat(sockets[0], [sock.getsockname() for sock in sockets[1:]], 64, 5 * MS)
    beat.said([b"x" * 64] * 2, now=1 << 62)  # it has just spoken itself
    beat.said(PACKETS, now=1 << 62)
    assert beat.stop() == [0, 0]
    assert not got(sockets[1])
    beat.said(PACKETS, now=0)  # it can begin anew
    for sock, packet in zip(sockets[1:], PACKETS, strict=True):
        sock.settimeout(PATIENCE)
        for _ in range(3):
            assert sock.recvfrom(100) == (packet, sockets[0].getsockname())
    sent = beat.stop()
    read = [3 + sum(1 for _ in iter(lambda sock=sock: got(sock), b"")) for sock in sockets[1:]]  # what was on its way
    assert sent == read
    assert beat.stop() == [0, 0]
    assert not any(got(sock) for sock in sockets[1:])
