"""Two ends of the reliable path on loopback, ranks 0 and 1 of a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tailbound.transport.reliable import Reliable

COOKIE, KEY = 0xC00C1E, bytes(range(32))


@contextmanager
def pair(*keys: bytes) -> Iterator[tuple[Reliable, Reliable]]:
    """Both have started, each with its own of ``keys``."""
    both = Reliable("127.0.0.1"), Reliable("127.0.0.1")
    peers = [("127.0.0.1", one.port) for one in both]
    for rank, (one, key) in enumerate(zip(both, keys or (b"", b""), strict=True)):
        one.start(COOKIE, rank, peers, key)
    try:
        yield both
    finally:
        for one in both:
            one.close()
