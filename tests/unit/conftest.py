"""A socket on loopback for what sends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tailbound.transport.sockets import UdpSocket

ADDRESS = "127.0.0.1"


@pytest.fixture
def bound() -> Iterator[UdpSocket]:
    with UdpSocket() as sock:
        sock.bind((ADDRESS, 0))
        yield sock
