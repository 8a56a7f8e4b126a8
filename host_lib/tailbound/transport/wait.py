"""Sleeping until a descriptor is readable or a time has come, to the microsecond.

Python's ``poll`` and ``epoll`` round a timeout up to milliseconds, and ``select`` refuses descriptors from 1024 on,
which a training process with many data loaders reaches. ``ppoll`` has neither flaw.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Collection, Sequence

_POLLIN, _POLLOUT = 1, 4
_ppoll = ctypes.CDLL(None, use_errno=True).ppoll


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class Waiter:
    """Waits on a fixed set of descriptors; allocates nothing per call, releases the GIL while it sleeps.

    Args:
        fds: to be readable.
        sending: to be writable, where ``want_room`` says so.
    """

    def __init__(self, fds: Sequence[int], sending: Sequence[int] = ()) -> None:
        entries = [_PollFd(fd, _POLLIN, 0) for fd in fds] + [_PollFd(-1, _POLLOUT, 0) for _ in sending]
        self._polled = (_PollFd * len(entries))(*entries)
        self._by_fd = {fd: self._polled[i] for i, fd in enumerate(fds) if fd >= 0}
        self._sending = list(sending)
        self._first = len(fds)
        self._wanted: Collection[int] = ()
        self._time = _Timespec()

    def want_room(self, wanted: Collection[int]) -> None:
        """Room in which of the sockets ``sending`` (by index) ends a wait too."""
        if wanted or self._wanted:
            for i, fd in enumerate(self._sending):
                self._polled[self._first + i].fd = fd if i in wanted else -1
            self._wanted = tuple(wanted)

    def wait(self, nanoseconds: int) -> int:
        """Returns how many descriptors are readable, after at most ``nanoseconds``; a signal may end it early.

        Raises:
            OSError: a descriptor is not what it was.
        """
        self._time.seconds, self._time.nanoseconds = divmod(max(0, nanoseconds), 1_000_000_000)
        ready = int(_ppoll(self._polled, len(self._polled), ctypes.byref(self._time), None))
        if ready >= 0:
            return ready
        number = ctypes.get_errno()
        if number == errno.EINTR:
            return 0
        raise OSError(number, os.strerror(number))

    def readable(self, fd: int) -> bool:
        """Whether the last wait found ``fd``, one of ``fds``, readable (or broken, which reading it will tell)."""
        return bool(self._by_fd[fd].revents)
