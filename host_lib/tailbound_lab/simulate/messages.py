"""What a ``transport.sockets.Socket`` is asked to send many of: the messages of one ``sendmmsg``, read back."""

from __future__ import annotations

import ctypes
import socket
from typing import NamedTuple


class Message(NamedTuple):
    """One burst: ``data`` in packets of ``stride`` bytes (the last may be shorter) for ``target``."""

    target: tuple[str, int]
    data: bytes
    stride: int

    @property
    def packets(self) -> list[bytes]:
        """The packets that it is cut into."""
        return [self.data[at : at + self.stride] for at in range(0, len(self.data), self.stride)]


def read(messages: int, count: int) -> list[Message]:
    """The ``count`` messages of the array of ``struct mmsghdr`` at address ``messages``."""
    words = (ctypes.c_uint64 * (8 * count)).from_address(messages)
    out = []
    for i in range(count):
        name, iovec, control = words[8 * i], words[8 * i + 2], words[8 * i + 4]
        raw = ctypes.string_at(name, 8)  # struct sockaddr_in
        base, size = (ctypes.c_uint64 * 2).from_address(iovec)
        data = ctypes.string_at(base, size)
        stride = int.from_bytes(ctypes.string_at(control + 16, 2), "little") if control else size
        out.append(Message((socket.inet_ntoa(raw[4:8]), int.from_bytes(raw[2:4], "big")), data, stride))
    return out
