"""Waiting for descriptors, and how long the interpreter lock is awaited after it."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Collection, Sequence
from time import CLOCK_MONOTONIC

import numpy as np
from numpy.typing import NDArray

from tailbound.datapath.native import clock_gettime, errno_location, ppoll
from tailbound.wire.jit import cached, njit

#: struct pollfd
_POLLFD = np.dtype([("fd", np.int32), ("events", np.int16), ("revents", np.int16)])


@cached
@njit(nogil=True, cache=True)
def _wait(polled: NDArray[np.uint64], time: NDArray[np.int64], woken: NDArray[np.int64]) -> int:
    """``ppoll``: returns descriptors that are ready, or -errno; ``woken`` gets the time before the GIL is awaited."""
    ready = ppoll(polled.ctypes.data, np.uint64(polled.size), time.ctypes.data, np.uintp(0))
    found: int = ready if ready >= 0 else -errno_location()[0]
    clock_gettime(CLOCK_MONOTONIC, woken.ctypes.data)
    return found


class Waiter:
    """Sleeps until a descriptor is readable or a time has come, to the microsecond; allocates nothing per call.

    The GIL is released meanwhile. Python's ``poll`` and ``epoll`` round a timeout up to milliseconds, and ``select``
    refuses descriptors from 1024 on, which a training process with many data loaders reaches. ``ppoll`` has neither
    flaw.

    Args:
        fds: to be readable.
        sending: to be writable, where ``want_room`` says so.
    """

    def __init__(self, fds: Sequence[int], sending: Sequence[int] = ()) -> None:
        entries = [(fd, select.POLLIN, 0) for fd in fds] + [(-1, select.POLLOUT, 0) for _ in sending]
        polled = np.array(entries, _POLLFD)
        self._polled, self._fds, self._found = polled.view(np.uint64), polled["fd"], polled["revents"]
        self._by_fd = {fd: i for i, fd in enumerate(fds) if fd >= 0}
        self._sending = list(sending)
        self._first = len(fds)
        self._wanted: Collection[int] = ()
        self._time, self._woken = np.zeros(2, np.int64), np.zeros(2, np.int64)

    def want_room(self, wanted: Collection[int]) -> None:
        """Room in which of the sockets ``sending`` (by index) ends a wait too."""
        if wanted or self._wanted:
            for i, fd in enumerate(self._sending):
                self._fds[self._first + i] = fd if i in wanted else -1
            self._wanted = tuple(wanted)

    def wait(self, nanoseconds: int) -> int:
        """Returns how many descriptors are readable, after at most ``nanoseconds``; a signal may end it early.

        Raises:
            OSError: a descriptor is not what it was.
        """
        self._time[:] = divmod(max(0, nanoseconds), 1_000_000_000)
        ready = int(_wait(self._polled, self._time, self._woken))
        if ready >= 0:
            return ready
        if ready == -errno.EINTR:
            return 0
        raise OSError(-ready, os.strerror(-ready))

    @property
    def woken(self) -> int:
        """When the last wait ended, CLOCK_MONOTONIC in ns: its caller has waited for the GIL since."""
        seconds, nanoseconds = self._woken.tolist()
        return seconds * 1_000_000_000 + nanoseconds

    def readable(self, fd: int) -> bool:
        """Whether the last wait found ``fd``, one of ``fds``, readable (or broken, which reading it will tell)."""
        return bool(self._found.item(self._by_fd[fd]))
