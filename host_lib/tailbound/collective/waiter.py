"""How the transport thread sleeps: in the library, which looks out meanwhile (``host_lib/core/wait.c``)."""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Sequence
from threading import Lock

import numpy as np

from tailbound.kernel.core import address, core
from tailbound.kernel.events import Source
from tailbound.transport.queue import SendQueue
from tailbound.wire.packets import record_of
from tailbound.wire.schema import SLEEP

#: struct pollfd
_POLLFD = np.dtype([("fd", np.int32), ("events", np.int16), ("revents", np.int16)])


class Sleep(record_of(SLEEP)):  # type: ignore[misc]
    """``tb_sleep`` of one thread: sleeps until only Python can do what is to be done, to the microsecond.

    The GIL is released meanwhile. Python's ``poll`` and ``epoll`` round a timeout up to milliseconds, and ``select``
    refuses descriptors from 1024 on, which a training process with many data loaders reaches. ``ppoll`` has neither
    flaw.

    Args:
        fds: to be readable, as in ``schema.Ready``.
        source: of events.
        queue: what is sent meanwhile.
        terms: address of ``tb_terms``.
        voice: of ``tb_voice``.
        owner: of ``tb_owner``.
        longest: ns of a wait.
        stopped: ns after which a thread that has not woken up was stopped.
    """

    count: int
    ready: int

    def __init__(
        self,
        fds: Sequence[int],
        source: Source,
        queue: SendQueue,
        terms: int,
        voice: int,
        owner: int,
        *,
        longest: int,
        stopped: int,
    ) -> None:
        entries = [(fd, select.POLLIN, 0) for fd in fds] + [(-1, select.POLLOUT, 0)] * len(queue.sender.sockets)
        polled = np.array(entries, _POLLFD)
        self._kept, self._queue, self.pointer = (polled, source), queue, ctypes.addressof(self)
        super().__init__(
            address(polled), terms, queue.line, ctypes.addressof(queue.said), source.pointer, owner, longest,
            stopped,
            voice=voice, fds=len(polled),
        )  # fmt: skip

    def wait(self, now: int, turn: Lock) -> int:
        """Sleeps; a signal may end it early. Returns what only Python can do (``schema.Woken``).

        Args:
            now: the time, ns.
            turn: held; others may have it meanwhile.

        Raises:
            OSError: a descriptor is not what it was.
        """
        self.tell()
        turn.release()
        found = core().waits.tb_sleep(self.pointer, now)
        turn.acquire()
        return int(core().fast.tb_back(self.pointer)) | _found(found)

    def appoint(self) -> None:
        """From now on a deputy stands in while the thread waits for the interpreter lock (``host_lib/core/deputy.c``).

        Raises:
            OSError: there can be none.
        """
        self._queue.said.sleep = self.pointer
        if error := core().fast.tb_appoint(self.pointer):
            raise OSError(error, os.strerror(error))

    def dismiss(self) -> None:
        """There is none any more."""
        core().fast.tb_dismiss(self.pointer)

    def tell(self) -> None:
        """Tells the library how far the queue can do without Python."""
        self._queue.tell()
        self.direct = self._queue.direct

    def peek(self) -> int:
        """Looks at what is readable (``schema.Ready``), sockets apart; keeps the GIL.

        Raises:
            OSError: a descriptor is not what it was.
        """
        return max(0, _found(core().fast.tb_peek(self.pointer)))

    def taken(self) -> list[int]:
        """Labels of ops that have begun elsewhere since the last call."""
        labels: list[int] = self.opened[: self.count]
        self.count = 0
        return labels


def _found(what: int) -> int:
    if what < 0 and what != -errno.EINTR:
        raise OSError(-what, os.strerror(-what))
    return what
