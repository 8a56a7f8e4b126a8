"""Bursts: how many packets are in one, and the sending of a single one. Rows leave by the send queue."""

from __future__ import annotations

import ctypes
import socket
import struct

from tailbound.errors import ConfigError
from tailbound.transport.sockets import Socket, sockaddr

#: A UDP GSO send holds at most this many segments (UDP_MAX_SEGMENTS before Linux 6.9) ...
MAX_SEGMENTS = 64
#: ... and this many bytes of UDP payload (65535 - 20 - 8).
MAX_BYTES = 65507
#: ``<linux/udp.h>``: segment size of a GSO send. The socket module has no name for it before 3.13.
_UDP_SEGMENT = 103


def burst_packets(stride: int) -> int:
    """Packets of ``stride`` bytes in one GSO send: 44 at 1472 bytes, 7 at 8960.

    Raises:
        ConfigError: not even one fits.
    """
    if not 0 < stride <= MAX_BYTES:
        raise ConfigError(f"packets of {stride} bytes: give 1..{MAX_BYTES}, as a UDP payload has")
    return min(MAX_SEGMENTS, MAX_BYTES // stride)


def send_burst(sock: Socket, target: tuple[str, int], data: bytes, stride: int) -> int:
    """Sends ``data`` in packets of ``stride`` bytes to ``target`` by one GSO send; returns 0, or the errno.

    The layout is that of 64-bit little-endian Linux.
    """
    name, body = (ctypes.create_string_buffer(part) for part in (sockaddr(target), data))
    control = ctypes.create_string_buffer(struct.pack("=QiiQ", 18, socket.IPPROTO_UDP, _UDP_SEGMENT, stride))
    piece = ctypes.create_string_buffer(struct.pack("=QQ", ctypes.addressof(body), len(data)))
    at = ctypes.addressof
    message = struct.pack("=8Q", at(name), len(name) - 1, at(piece), 1, at(control), len(control) - 1, 0, 0)
    memory = ctypes.create_string_buffer(message)
    return sock.send_many(at(memory), 1)[1]
