"""Socket buffers as large as they can be had."""

from __future__ import annotations

import socket

#: ``<asm-generic/socket.h>``: past the system's limits, for who has CAP_NET_ADMIN.
_FORCED = {socket.SO_SNDBUF: 32, socket.SO_RCVBUF: 33}


def reserve(sock: socket.socket, which: int, size: int) -> None:
    """Asks for ``size`` bytes of ``SO_SNDBUF`` or ``SO_RCVBUF``; without privileges the system's limit is the limit."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _FORCED[which], size)
    except OSError:
        sock.setsockopt(socket.SOL_SOCKET, which, size)
