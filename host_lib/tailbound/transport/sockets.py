"""What sending needs of a socket, and the system's UDP socket, which has it.

Whoever wants to see, lose or delay what a rank sends puts a ``Socket`` of its own in the place of the system's: nothing
else of a job has to know.
"""

from __future__ import annotations

import ctypes
import errno
import socket
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
