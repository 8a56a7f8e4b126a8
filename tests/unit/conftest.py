"""Sockets on loopback for what sends."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tailbound.transport.sockets import UdpSocket

ADDRESS = "127.0.0.1"


@pytest.fixture
def receivers() -> Iterator[list[socket.socket]]:
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(3)]
    for sock in sockets:
        sock.bind((ADDRESS, 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    yield sockets
    for sock in sockets:
        sock.close()


@pytest.fixture
def bound() -> Iterator[UdpSocket]:
    with UdpSocket() as sock:
        sock.bind((ADDRESS, 0))
        yield sock
