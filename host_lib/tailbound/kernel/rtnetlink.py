"""rtnetlink by one socket that stays with the network namespace it was made in, whichever thread uses it later.

pyroute2 binds a socket to the thread that made it, and what has to be undone at the end is undone anywhere.
"""

from __future__ import annotations

import os
import socket
import struct

REQUEST, ACK, EXCLUSIVE, CREATE, DUMP = 0x1, 0x4, 0x200, 0x400, 0x300
_ERROR, _DONE = 2, 3
_HEAD = struct.Struct("=IHHII")


def attribute(kind: int, data: bytes) -> bytes:
    """One attribute, padded."""
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def attributes(data: bytes) -> dict[int, bytes]:
    """Values of the attributes in ``data`` by kind, flags of kinds aside."""
    found, at = {}, 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            break
        found[kind & 0x3FFF] = data[at + 4 : at + length]
        at += (length + 3) & ~3
    return found


class Rtnetlink:
    """A socket for requests, one at a time."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)

    def request(self, kind: int, flags: int, body: bytes) -> None:
        """A request that is answered by an acknowledgement.

        Raises:
            OSError: the kernel's refusal.
        """
        self._ask(kind, flags | ACK, body)

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """Bodies of all messages that answer a request for a list.

        Raises:
            OSError: the kernel's refusal.
        """
        return self._ask(kind, DUMP, body)

    def _ask(self, kind: int, flags: int, body: bytes) -> list[bytes]:
        self._socket.send(_HEAD.pack(_HEAD.size + len(body), kind, REQUEST | flags, 1, 0) + body)
        found: list[bytes] = []
        while True:
            reply, at = self._socket.recv(1 << 17), 0
            while at < len(reply):
                length, answer, _, _, _ = _HEAD.unpack_from(reply, at)
                if answer in (_ERROR, _DONE):
                    number = -struct.unpack_from("=i", reply, at + _HEAD.size)[0]
                    if number:
                        raise OSError(number, os.strerror(number))
                    return found
                found.append(reply[at + _HEAD.size : at + length])
                at += (length + 3) & ~3

    def close(self) -> None:
        """Closes the socket; may be called twice."""
        self._socket.close()
