"""A connection to every other rank that says nothing: when a process dies its kernel closes it, and the others know.

Without it a rank that was killed is suspected when it has missed three ops, and each may wait for it until its
deadline. A word of farewell before a connection is closed tells that no rank died; in a job with a key it is a tag, one
for each side (auth-6). What else ends a connection is a death, or a middlebox, or a rank who would like it to look
like a death: ``reliable`` makes it anew, and a rank has died only where that is refused.

A rank that comes back connects anew. The connection to the process before it may end after that (its host had lost
power, say), and says nothing of the new one: only the end of the newest connection to a rank counts.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple


class Farewell(NamedTuple):
    """What the own side says before it closes a connection, and what the other one says."""

    own: bytes = b"."
    theirs: bytes = b"."


#: Without a key.
PLAIN = Farewell()
#: Connections to one rank that are kept: both sides may make one, and who only seems to be gone leaves another.
_KEPT = 4


class Lifelines:
    """The connections of one rank, and a thread that watches them.

    Args:
        lost: called with the rank whose newest connection has ended without a farewell, in that thread.
    """

    def __init__(self, lost: Callable[[int], None]) -> None:
        self._lost = lost
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, -1)
        self._lock = threading.Lock()
        self._lines: dict[socket.socket, tuple[int, Farewell]] = {}  # the oldest first
        self._newest: dict[int, socket.socket] = {}
        self._over = False
        self._thread = threading.Thread(target=self._run, name="tailbound-lifeline", daemon=True)
        self._thread.start()

    def descriptors(self) -> list[int]:
        """See ``forks.Owner``: a child that kept a connection would keep its parent's death from the others."""
        return [line.fileno() for line in list(self._lines) if line.fileno() >= 0]

    def hold(self, rank: int, line: socket.socket, farewell: Farewell = PLAIN) -> None:
        """Watches a connection to ``rank``, which is this object's from now on."""
        with self._lock:
            if self._over:
                line.close()
                return
            line.settimeout(0)
            held = [each for each, (whose, _) in self._lines.items() if whose == rank]
            for old in held[: len(held) + 1 - _KEPT]:
                self._selector.unregister(old)
                del self._lines[old]
                old.close()
            self._lines[line] = rank, farewell
            self._newest[rank] = line
            self._selector.register(line, selectors.EVENT_READ, rank)

    def has(self, rank: int) -> bool:
        """Whether the newest connection to ``rank`` has not ended."""
        with self._lock:
            return self._newest.get(rank) in self._lines

    def close(self, *, farewell: bool = True) -> None:
        """Says farewell, or nothing, as a process that dies; and ends the thread."""
        with self._lock:
            if self._over:
                return
            os.eventfd_write(self._wake, 1)  # the thread closes it as soon as it is over
            self._over = True
            for line, (_, words) in self._lines.items() if farewell else ():
                with contextlib.suppress(OSError):
                    line.send(words.own)
        if self._thread is not threading.current_thread():
            self._thread.join(5)

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select():
                if key.data >= 0:
                    self._check(key.data, key.fileobj)  # type: ignore[arg-type]
        with self._lock:  # farewells have been said
            for line in self._lines:
                line.close()
        self._selector.close()
        os.close(self._wake)

    def _check(self, rank: int, line: socket.socket) -> None:
        with self._lock:
            if line not in self._lines:
                return  # it gave way since
            try:
                said = line.recv(64)
            except BlockingIOError:
                return
            except OSError:
                said = b""
            self._selector.unregister(line)
            well = said == self._lines.pop(line)[1].theirs
            newest = self._newest.get(rank) is line
            line.close()
        if newest and not well and not self._over:
            self._lost(rank)
