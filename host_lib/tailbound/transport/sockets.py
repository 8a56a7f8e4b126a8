"""UDP sockets: what sending needs of one, the system's, and how they are opened.

One is bound to the job's port, others are for bursts, with buffers as large as they can be had. Whoever wants to see,
lose or delay what a rank sends puts a ``Socket`` of its own in the place of the system's: nothing else of a job has to
know.
"""

from __future__ import annotations

import errno
import logging
import socket
import struct
from collections.abc import Sequence
from typing import Protocol

from tailbound.errors import CapabilityError, ConfigError
from tailbound.wire.address import endpoint, family_of

log = logging.getLogger("tailbound")

#: A UDP GSO send holds at most this many segments (UDP_MAX_SEGMENTS before Linux 6.9) ...
MAX_SEGMENTS = 64
#: ... and this many bytes of UDP payload (65535 - 20 - 8).
MAX_BYTES = 65507
#: ``<linux/udp.h>``: segment size of a GSO send. The socket module has no name for it before 3.13.
_UDP_SEGMENT = 103


class Socket(Protocol):
    """A bound UDP socket as ``Sender`` and ``SendQueue`` use it. No call waits, none raises.

    For one of the system's the library makes the calls of bursts. Any other has ``send_many(messages, count)``, too,
    with the address of an array of ``struct mmsghdr``: it returns how many were taken, and the errno if none was.
    """

    def fileno(self) -> int:
        """Descriptor to wait on until there is room again."""

    def room(self) -> int:
        """Bytes that may wait in it."""

    def send_one(self, packet: bytes, target: tuple[str, int], stride: int = 0) -> int:
        """Sends one packet to ``target`` (IP address, UDP port); returns 0, or the errno of what refused it.

        Args:
            stride: what is sent is a burst of packets of so many bytes, by segmentation offload; 0: it is not.
        """


class UdpSocket(socket.socket):
    """A UDP socket of the system, for IPv4 unless told otherwise; a ``Socket``."""

    def __init__(self, family: socket.AddressFamily = socket.AF_INET) -> None:
        super().__init__(family, socket.SOCK_DGRAM)

    def room(self) -> int:
        """See ``Socket``."""
        return buffer_of(self, socket.SO_SNDBUF)

    def send_one(self, packet: bytes, target: tuple[str, int], stride: int = 0) -> int:
        """See ``Socket``."""
        segment = [(socket.IPPROTO_UDP, _UDP_SEGMENT, struct.pack("=H", stride))] if stride else []
        try:
            self.sendmsg([packet], segment, socket.MSG_DONTWAIT, target)
        except OSError as error:
            return error.errno or errno.EIO
        return 0


#: Bytes that hold a ``struct sockaddr_in`` or ``sockaddr_in6``; the kernel takes either with more behind it.
SOCKADDR_BYTES = 32


def sockaddr(target: tuple[str, int]) -> bytes:
    """``struct sockaddr_in`` or ``sockaddr_in6`` of ``target`` (IP address, UDP port), ``SOCKADDR_BYTES`` long."""
    host, port = target
    family = family_of(host)
    flow = bytes(4) if family == socket.AF_INET6 else b""
    head = family.to_bytes(2, "little") + port.to_bytes(2, "big")
    return (head + flow + socket.inet_pton(family, host)).ljust(SOCKADDR_BYTES, b"\0")


def burst_packets(stride: int) -> int:
    """Packets of ``stride`` bytes in one GSO send: 44 at 1472 bytes, 7 at 8960.

    Raises:
        ConfigError: not even one fits.
    """
    if not 0 < stride <= MAX_BYTES:
        raise ConfigError(f"packets of {stride} bytes: give 1..{MAX_BYTES}, as a UDP payload has")
    return min(MAX_SEGMENTS, MAX_BYTES // stride)


#: ``<asm-generic/socket.h>``: past the system's limits, for who has CAP_NET_ADMIN.
_FORCED = {socket.SO_SNDBUF: 32, socket.SO_RCVBUF: 33}
#: Bytes asked for the buffers of all sockets that bursts leave over, and of one at least (two super-frames); how many
#: sockets, and how many of them for one peer.
_SEND_BYTES, _SEND_LEAST, SOCKETS, _PORTS = 1 << 20, 160 << 10, 16, 4


_BUFFERS = {socket.SO_SNDBUF: "SO_SNDBUF", socket.SO_RCVBUF: "SO_RCVBUF"}


def buffer_of(sock: socket.socket, which: int) -> int:
    """Bytes of buffer that ``sock`` has; ``which``: ``SO_SNDBUF`` or ``SO_RCVBUF``.

    Raises:
        CapabilityError: the system does not say.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, which)
    except OSError as error:
        raise CapabilityError(
            f"this system refuses to tell {_BUFFERS[which]} of a UDP socket ({error.strerror}), by which bursts are "
            "measured: allow getsockopt in the sandbox or container"
        ) from error


def reserve(sock: socket.socket, which: int, size: int) -> None:
    """Asks for ``size`` bytes of ``SO_SNDBUF`` or ``SO_RCVBUF``; without privileges the system's limit is the limit."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _FORCED[which], size)
    except OSError:
        with_option(sock, (socket.SOL_SOCKET, which), size, _BUFFERS[which], "bursts may overflow small buffers")


_said: set[str] = set()  # options that this system has refused, each told once


def with_option(sock: socket.socket, option: tuple[int, int], value: int, name: str, lack: str) -> None:
    """Sets an ``option`` (level, number) that is of use and can be done without; ``lack``: what follows without it."""
    try:
        sock.setsockopt(*option, value)
    except OSError as error:
        if name not in _said:
            _said.add(name)
            log.warning("this system refuses the socket option %s (%s): %s", name, error.strerror, lack)


#: ECT(0): routers may mark what leaves in place of dropping it (RFC 3168).
_ECT = 2
#: ``<linux/in.h>``, ``<linux/in6.h>``
_MTU_DISCOVER, _MTU_DISCOVER_6, _PMTUDISC_PROBE = (socket.IPPROTO_IP, 10), (socket.IPPROTO_IPV6, 23), 3


def prepare_rows(sock: socket.socket, dscp: int) -> None:
    """Packets of ``sock`` leave in class ``dscp`` (0 to 63), may be marked where queues build up, and never in pieces.

    Rows that arrive in fragments are not summed, so whatever is known of the path, they leave whole or not at all.
    """
    old = sock.family != socket.AF_INET6
    tos = (socket.IPPROTO_IP, socket.IP_TOS) if old else (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
    lack = "packets have no class (dscp), and routers drop where they would mark"
    with_option(sock, tos, dscp << 2 | _ECT, "IP_TOS" if old else "IPV6_TCLASS", lack)
    lack = "rows may leave in fragments, which xdp does not take, where a route knows a smaller MTU"
    discover, name = (_MTU_DISCOVER, "IP_MTU_DISCOVER") if old else (_MTU_DISCOVER_6, "IPV6_MTU_DISCOVER")
    with_option(sock, discover, _PMTUDISC_PROBE, name, lack)


def bound_socket(address: str, ports: Sequence[int], room: int, otherwise: str) -> UdpSocket:
    """The UDP socket at ``address`` that takes control packets.

    Args:
        address: own IP address.
        ports: the first of these that is free; 0: any.
        room: bytes of receive buffer to ask for; the system may grant less.
        otherwise: what to do where they are taken, beside choosing others.

    Raises:
        ConfigError: all ports are taken, or the address is not this machine's.
    """
    out = UdpSocket(family_of(address))
    out.setblocking(False)
    reserve(out, socket.SO_RCVBUF, room)
    for port in ports:
        try:
            out.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                out.close()
                where = endpoint(address, port)
                raise ConfigError(f"cannot bind {where}, {error.strerror}: give a local address") from error
        else:
            return out
    out.close()
    more = f" to {ports[-1]}" if len(ports) > 1 else ""
    raise ConfigError(f"UDP port {ports[0]}{more} on {address} is taken: choose another, {otherwise}")


def ports_of(peers: int) -> int:
    """Source ports of the bursts to one of ``peers`` peers.

    A receiver with several queues has one processor for each flow, so a few flows are to come to it. With many peers
    they do; with few, each sends over several ports, as many as there is buffer for (``_SEND_BYTES`` for all peers): 4
    to one peer, 3 to each of two, 2 to each of three, else one.
    """
    return max(1, min(_PORTS, _SEND_BYTES // _SEND_LEAST // peers))


def room_of(count: int) -> int:
    """Bytes of room for one of ``count`` sockets, or for one of whose bursts ``count`` copies are made.

    More than ``_SEND_BYTES`` together would be a standing queue behind a slow link; with less the link idles while a
    busy host gets round to the next burst.
    """
    return max(_SEND_LEAST, _SEND_BYTES // count)


def sending_socket(address: str, room: int) -> UdpSocket:
    """A UDP socket for bursts at any port, with ``room`` bytes of buffer."""
    sock = UdpSocket(family_of(address))
    sock.setblocking(False)
    sock.bind((address, 0))
    reserve(sock, socket.SO_SNDBUF, room)
    return sock
