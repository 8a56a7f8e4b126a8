"""Who has a place on the reliable path: in a job with a key strangers cannot hold the places of those who have it.

Before its request has come with its tag a connection may be anybody's, also another user's on the host of a rank. Such
ones give way to new ones, the oldest first, and an address has only so many of them; one that has shown the key stays.
Who opens more connections than that from a rank's own address in the time that a greeting takes may still push out that
rank's next one, which then tries again; other addresses do not notice.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterable

#: Connections that may be open beside two for each rank: of an address before they are proven, and of all.
_BESIDE = 8


class Places:
    """The connections that are being answered; any thread may call it.

    Args:
        addresses: of all ranks, each as often as ranks are there.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self._ranks = Counter(addresses)
        self._most = _BESIDE + 2 * self._ranks.total()
        self._lock = threading.Lock()
        self._unproven: dict[socket.socket, str] = {}  # the oldest first
        self._proven: set[socket.socket] = set()
        #: unproven ones that had to give way
        self.evicted = 0

    def enter(self, sock: socket.socket, address: str, *, keyed: bool) -> bool:
        """Whether there is a place for ``sock``; in a job with a key there always is one, until it is to ``prove``."""
        with self._lock:
            if not keyed:
                return address in self._ranks and self._settle(sock)
            if address not in self._ranks:
                return False
            held = Counter(self._unproven.values())
            if held[address] >= _BESIDE + 2 * self._ranks[address]:
                self._evict(address)
            elif held.total() >= self._most:
                self._evict(held.most_common(1)[0][0])
            self._unproven[sock] = address
            return True

    def prove(self, sock: socket.socket) -> bool:
        """``sock`` has shown the key; whether it is still there, and there is room."""
        with self._lock:
            return self._unproven.pop(sock, None) is not None and self._settle(sock)

    def leave(self, sock: socket.socket) -> None:
        """``sock`` is over."""
        with self._lock:
            self._unproven.pop(sock, None)
            self._proven.discard(sock)

    def _settle(self, sock: socket.socket) -> bool:
        if len(self._proven) >= self._most:
            return False
        self._proven.add(sock)
        return True

    def _evict(self, address: str) -> None:
        oldest = next(sock for sock, whose in self._unproven.items() if whose == address)
        del self._unproven[oldest]
        self.evicted += 1
        with contextlib.suppress(OSError):  # its thread ends by that
            oldest.shutdown(socket.SHUT_RDWR)
