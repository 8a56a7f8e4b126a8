"""A connection to every other rank that says nothing: when a process dies its kernel closes it, and the others know.

Without it a rank that was killed is suspected when it has missed three ops, and each may wait for it until its
deadline. What ends a connection is a death, or a middlebox, or somebody who would like it to look like a death. So it
is made anew, and who takes it lives (auth-6). A rank has ended only where that is refused, and has died unless it has
said goodbye over UDP.

A rank that comes back connects anew. The connection to the process before it may end after that (its host had lost
power, say), and says nothing of the new one: only the end of the newest connection to a rank counts.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from tailbound.errors import TransportError
from tailbound.transport.backoff import Policy
from tailbound.transport.config import MS

log = logging.getLogger("tailbound")

#: Connections to one rank that are kept: both sides may make one, and who only seems to be gone leaves another.
_KEPT = 4
#: A rank is looked at once in so many seconds: who ends connections makes no more work than that.
_LOOK_EVERY = 1.0
#: How a connection is tried again that could not be made, and after how many trials the log says so.
_AGAIN, _WARNED = Policy(20 * MS, 5_000 * MS), 4
#: Seconds without a word until the kernel asks for one, from one question to the next, and questions without an answer
#: that end a connection. Nothing between the hosts forgets it, and no host that has gone is kept.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class Lifelines:
    """The connections of one rank, and a thread that watches them.

    Args:
        connect: makes a connection to a rank anew and gives it to ``hold``, or raises a TransportError.
        lost: called where a rank refuses that; may wait. If it returns true the process has ended, else there are more
            attempts.

    Attributes:
        renewed: connections that ended and were made anew.
    """

    def __init__(self, connect: Callable[[int], None], lost: Callable[[int], bool]) -> None:
        self._connect, self._lost = connect, lost
        self.renewed = 0
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, -1)
        self._lock = threading.Lock()
        self._lines: dict[socket.socket, int] = {}  # to whom, the oldest first
        self._newest: dict[int, socket.socket] = {}
        self._due: dict[int, tuple[float, int]] = {}  # by rank: when to look at it (monotonic seconds), and trials
        self._looked: dict[int, float] = {}
        self._over = False
        self._thread = threading.Thread(target=self._run, name="tailbound-lifeline", daemon=True)
        self._thread.start()

    def descriptors(self) -> list[int]:
        """See ``forks.Owner``: a child that kept a connection would keep its parent's death from the others."""
        return [line.fileno() for line in list(self._lines) if line.fileno() >= 0]

    def hold(self, rank: int, sock: socket.socket) -> socket.socket:
        """Watches a connection to ``rank``, which is taken from ``sock``."""
        line = socket.socket(fileno=sock.detach())
        line.settimeout(0)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            line.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._lock:
            if self._over:
                line.close()
                return line
            held = [each for each, whose in self._lines.items() if whose == rank]
            for old in held[: len(held) + 1 - _KEPT]:
                self._selector.unregister(old)
                del self._lines[old]
                old.close()
            self._lines[line], self._newest[rank] = rank, line
            self._selector.register(line, selectors.EVENT_READ, rank)
        return line

    def close(self) -> None:
        """Ends all connections and the thread."""
        with self._lock:
            if self._over:
                return
            os.eventfd_write(self._wake, 1)  # the thread closes it as soon as it is over
            self._over = True
        if self._thread is not threading.current_thread():
            self._thread.join(5)

    def _run(self) -> None:
        while not self._over:
            soonest = min((at for at, _ in self._due.values()), default=math.inf)
            pause = max(0.0, soonest - time.monotonic())
            for key, _ in self._selector.select(pause if self._due else None):
                if key.data >= 0:
                    self._check(key.data, key.fileobj)  # type: ignore[arg-type]
            now = time.monotonic()
            if due := [(tries, -at, rank) for rank, (at, tries) in self._due.items() if at <= now]:
                tries, _, rank = min(due)  # one at a time, since some take a second: who has just ended comes first
                self._look(rank, tries)
        for line in self._lines:
            line.close()
        self._selector.close()
        os.close(self._wake)

    def _check(self, rank: int, line: socket.socket) -> None:
        """A connection to ``rank`` has ended; a word over it, which no rank says, is no better."""
        with self._lock:
            if line not in self._lines:
                return  # it gave way since
            self._selector.unregister(line)
            del self._lines[line]
            line.close()
        if self._newest[rank] is line and rank not in self._due:
            at = self._looked[rank] = max(time.monotonic(), self._looked.get(rank, 0.0) + _LOOK_EVERY)
            self._due[rank] = at, 0

    def _look(self, rank: int, tries: int) -> None:
        """Makes a connection anew that has ended; where that is refused the process may have, too."""
        del self._due[rank]
        try:
            if self._newest[rank] not in self._lines:  # the other side has made none
                self._connect(rank)
            self.renewed += 1
        except TransportError as error:
            if self._over or (isinstance(error.__cause__, ConnectionRefusedError) and self._lost(rank)):
                return
            if tries == _WARNED:
                log.warning(
                    "the TCP connection to rank %d has ended and cannot be made anew: unless that rank has left, its "
                    "end would be waited for in three ops; let TCP pass between all hosts (%s)",
                    rank,
                    error,
                )
            self._due[rank] = time.monotonic() + _AGAIN.wait(tries + 1) / 1e9, tries + 1
