"""What sending needs of a socket, the system's UDP socket, which has it, and waiting for descriptors.

Whoever wants to see, lose or delay what a rank sends puts a ``Socket`` of its own in the place of the system's: nothing
else of a job has to know.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Collection, Sequence
from typing import Protocol

_MSG_DONTWAIT = 0x40
_sendmmsg = ctypes.CDLL(None, use_errno=True).sendmmsg
_sendmmsg.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)
_sendmmsg.restype = ctypes.c_int


class Socket(Protocol):
    """A bound UDP socket as ``Sender`` and ``SendQueue`` use it. No call waits, none raises."""

    def fileno(self) -> int:
        """Descriptor to wait on until there is room again."""

    def send_one(self, packet: bytes, target: tuple[str, int]) -> int:
        """Sends one packet to ``target`` (IPv4 address, UDP port); returns 0, or the errno of what refused it."""

    def send_many(self, messages: int, count: int) -> tuple[int, int]:
        """Sends ``count`` messages; returns how many were taken, and the errno if none was.

        Args:
            messages: address of an array of ``struct mmsghdr``, as ``transport.batch.Batch`` lays it out.
            count: at least 1.
        """


class UdpSocket(socket.socket):
    """An IPv4 UDP socket of the system; a ``Socket``."""

    def __init__(self) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_DGRAM)

    def send_one(self, packet: bytes, target: tuple[str, int]) -> int:
        """See ``Socket``."""
        try:
            self.sendto(packet, socket.MSG_DONTWAIT, target)
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def send_many(self, messages: int, count: int) -> tuple[int, int]:
        """See ``Socket``: one ``sendmmsg``."""
        taken = int(_sendmmsg(self.fileno(), messages, count, _MSG_DONTWAIT))
        return (taken, 0) if taken >= 0 else (0, ctypes.get_errno())


_POLLIN, _POLLOUT = 1, 4
_ppoll = ctypes.CDLL(None, use_errno=True).ppoll


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


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
