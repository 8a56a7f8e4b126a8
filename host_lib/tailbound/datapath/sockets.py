"""UDP sockets of the datapaths: bound to the job's port, or for bursts, with buffers as large as they can be had."""

from __future__ import annotations

import contextlib
import errno
import socket

from tailbound.errors import ConfigError
from tailbound.transport.sockets import UdpSocket

#: ``<asm-generic/socket.h>``: past the system's limits, for who has CAP_NET_ADMIN.
_FORCED = {socket.SO_SNDBUF: 32, socket.SO_RCVBUF: 33}
#: Bytes asked for the buffer of a socket that takes control packets.
_RECEIVE_BYTES = 8 << 20
#: Bytes asked for the buffers of all sockets that bursts leave over, and of one at least (two super-frames); how many
#: sockets, and how many of them for one peer unless more are asked for.
_SEND_BYTES, _SEND_LEAST, SOCKETS, _PORTS = 1 << 20, 160 << 10, 16, 4
#: How often consecutive ports are looked for.
_ATTEMPTS = 16


def reserve(sock: socket.socket, which: int, size: int) -> None:
    """Asks for ``size`` bytes of ``SO_SNDBUF`` or ``SO_RCVBUF``; without privileges the system's limit is the limit."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _FORCED[which], size)
    except OSError:
        sock.setsockopt(socket.SOL_SOCKET, which, size)


def bound_socket(address: str, port: int) -> UdpSocket:
    """The UDP socket at ``address``: it takes control packets, and keeps peers from seeing ECONNREFUSED.

    Raises:
        ConfigError: the port is taken.
    """
    out = UdpSocket()
    try:
        out.setblocking(False)
        reserve(out, socket.SO_RCVBUF, _RECEIVE_BYTES)
        out.bind((address, port))
    except OSError as error:
        out.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"UDP port {port} of {address} is taken, and the xdp datapath takes one rank and one job an interface: "
                f"`ss -ulnp sport = :{port}` names who has it; end that, choose another interface, or take the udp "
                "datapath (TAILBOUND_DATAPATH=udp)"
            ) from error
        raise ConfigError(f"UDP port {port} of {address} cannot be had: {error.strerror}; choose another") from error
    return out


def ports_of(peers: int, asked: int = 0) -> int:
    """Source ports of the bursts to one of ``peers`` peers.

    A receiver with several queues has one processor for each flow, so a few flows are to come to it. With many peers
    they do; with few, each sends over several ports, as many as there is buffer for (``_SEND_BYTES`` for all peers): 4
    to one peer, 3 to each of two, 2 to each of three, else one.

    Args:
        peers: at least 1.
        asked: so many, as far as ``SOCKETS`` last; 0: as above.
    """
    return max(1, min(asked or min(_PORTS, _SEND_BYTES // _SEND_LEAST // peers), SOCKETS // peers))


def room_of(count: int) -> int:
    """Bytes of room for one of ``count`` sockets, or for one of whose bursts ``count`` copies are made.

    More than ``_SEND_BYTES`` together would be a standing queue behind a slow link; with less the link idles while a
    busy host gets round to the next burst.
    """
    return max(_SEND_LEAST, _SEND_BYTES // count)


def sending_socket(address: str, room: int, port: int = 0) -> UdpSocket:
    """A UDP socket for bursts, with ``room`` bytes of buffer, at ``port`` (0: any that is free).

    Raises:
        OSError: the port is taken.
    """
    sock = UdpSocket()
    sock.setblocking(False)
    try:
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    reserve(sock, socket.SO_SNDBUF, room)
    return sock


def sending_sockets(address: str, count: int) -> list[UdpSocket]:
    """``count`` UDP sockets for bursts, with ports of their own and the room that ``room_of`` says."""
    return [sending_socket(address, room_of(count)) for _ in range(count)]


def neighbouring_sockets(address: str, count: int, room: int) -> list[UdpSocket]:
    """``count`` UDP sockets for bursts with consecutive ports, for a program that knows them by the first.

    Where the system is short of ports they are fewer, but one at least.
    """
    for attempt in range(_ATTEMPTS):
        socks = [sending_socket(address, room)]
        first = int(socks[0].getsockname()[1])
        with contextlib.suppress(OSError, OverflowError):
            socks.extend(sending_socket(address, room, port) for port in range(first + 1, first + count))
        if len(socks) == count or attempt == _ATTEMPTS - 1:
            break
        for sock in socks:
            sock.close()
    return socks
