"""What several files need: a socket on loopback for what sends, and the key of a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tailbound.transport.sockets import UdpSocket

ADDRESS = "127.0.0.1"


@pytest.fixture
def bound() -> Iterator[UdpSocket]:
    with UdpSocket() as sock:
        sock.bind((ADDRESS, 0))
        yield sock


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """A file with the key of a job, which nobody else may read."""
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(bytes(range(32)))
    return path
