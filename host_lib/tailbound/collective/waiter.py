"""Waiting for descriptors, and how long the interpreter lock is awaited after it."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Collection, Sequence

import numpy as np

from tailbound.kernel.core import address, core

#: The first of what the transport thread waits for, as bits of ``Waiter.ready``: what other threads have handed over,
#: events, control packets.
HANDED, EVENTS, CONTROLS = 1, 2, 4
#: struct pollfd
_POLLFD = np.dtype([("fd", np.int32), ("events", np.int16), ("revents", np.int16)])


class Waiter:
    """Sleeps until a descriptor is readable or a time has come, to the microsecond; allocates nothing per call.

    The GIL is released meanwhile. Python's ``poll`` and ``epoll`` round a timeout up to milliseconds, and ``select``
    refuses descriptors from 1024 on, which a training process with many data loaders reaches. ``ppoll`` has neither
    flaw.

    Args:
        fds: to be readable.
        sending: to be writable, where ``want_room`` says so.

    Attributes:
        ready: bitmap of what the last wait found readable of ``fds`` (or broken, which reading it will tell), and of
            ``sending`` behind them.
    """

    def __init__(self, fds: Sequence[int], sending: Sequence[int] = ()) -> None:
        entries = [(fd, select.POLLIN, 0) for fd in fds] + [(-1, select.POLLOUT, 0) for _ in sending]
        polled = np.array(entries, _POLLFD)
        self._fds = polled["fd"]
        self._sending = list(sending)
        self._first = len(fds)
        self._wanted: Collection[int] = ()
        self._woken = np.zeros(1, np.int64)
        self._wait, self._look = core().waits.tb_wait, core().fast.tb_wait
        self._arguments = address(polled), len(polled), address(self._woken)
        self._polled = polled
        self.ready = 0

    def want_room(self, wanted: Collection[int]) -> None:
        """Room in which of the sockets ``sending`` (by index) ends a wait too."""
        if wanted or self._wanted:
            for i, fd in enumerate(self._sending):
                self._fds[self._first + i] = fd if i in wanted else -1
            self._wanted = tuple(wanted)

    def wait(self, nanoseconds: int) -> int:
        """Waits at most ``nanoseconds``; a signal may end it early. Returns ``ready``.

        Raises:
            OSError: a descriptor is not what it was.
        """
        polled, count, woken = self._arguments
        look = self._wait if nanoseconds > 0 else self._look  # which keeps the GIL, and takes a microsecond
        ready: int = look(polled, count, max(0, nanoseconds), woken)
        if ready < 0 and ready != -errno.EINTR:
            raise OSError(-ready, os.strerror(-ready))
        self.ready = max(0, ready)
        return self.ready

    @property
    def woken(self) -> int:
        """When the last wait ended, CLOCK_MONOTONIC in ns: its caller has waited for the GIL since."""
        return self._woken.item(0)
