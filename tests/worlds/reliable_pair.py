"""Two ends of the reliable path on loopback, ranks 0 and 1 of a job."""

from __future__ import annotations

import threading
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


def slow(one: Reliable) -> tuple[threading.Event, threading.Event]:
    """``one`` serves ``slow``: set when it has been asked, and to be set when it is to answer."""
    asked, go_on = threading.Event(), threading.Event()

    def wait(_: bytes) -> list[bytes]:
        asked.set()
        go_on.wait(30)
        return [b"slow"]

    one.serve("slow", wait)
    return asked, go_on
