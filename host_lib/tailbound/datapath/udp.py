"""The udp datapath: sockets and numba instead of XDP. No privileges; the same rules, verdicts and bits.

A thread receives super-packets (UDP GRO) and takes them in by ``ingest`` in one nogil loop. As in the kernel, a rank is
known by its address, whatever source port it sends from. Several ranks may live on one address: packets name their
sender, and each rank receives at a port of its own. The sender shares the socket: it is one reader that takes all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tailbound.datapath.buffers import reserve
from tailbound.datapath.native import SUPPORTED, messages
from tailbound.datapath.protocol import EventRecord
from tailbound.datapath.receive import BATCH, BUFFER_BYTES, SO_RXQ_OVFL, UDP_GRO, receive
from tailbound.datapath.store import allocate, store_of
from tailbound.datapath.tables import CONTROLS_LOST, KERNEL_DROPS, STOP, Tables
from tailbound.errors import CapabilityError, ConfigError
from tailbound.forks import keep_from_children
from tailbound.transport.sockets import UdpSocket

#: Below this many bytes of receive buffer (three or four super-packets fit into 208 KiB) senders must leave gaps.
_AMPLE_BUFFER = 2 << 20
_GAP = 60_000  # ns between bursts; longer gaps lost no fewer, shorter ones more, and no gap was no faster


def _bind(sock: socket.socket, address: str, ports: Sequence[int]) -> None:
    """Binds ``sock`` to the first of ``ports`` that is free.

    Raises:
        ConfigError: none is, or the address is not this machine's.
    """
    for port in ports:
        try:
            sock.bind((address, port))
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"cannot bind {address}:{port}, {error.strerror}: give a local address") from error
    which = f"port {ports[0]}" if len(ports) == 1 else f"ports {ports[0]} to {ports[-1]}"
    are = "is" if len(ports) == 1 else "are"
    raise ConfigError(f"UDP {which} on {address} {are} taken: choose another, or 0 for any (port=, TAILBOUND_PORT)")


def _receive(arguments: tuple[Any, ...], *_kept: object) -> None:
    receive(*arguments)


class UdpDatapath:
    """Receives on ``address``:``port`` and sums in user space; implements ``protocol.Datapath``.

    ``store`` is filled in by the caller as for XDP: control, peers, then ``control.active``.

    Args:
        address: own IPv4 address.
        port: own UDP port, or several, of which the first free one is taken; 0: any.
        width: codes of a row at most, a multiple of 64.
        sum_rows: rows of the sums ring, a power of two.
        result_rows: rows of the result ring, a power of two.
        receive_buffer: bytes of socket buffer to ask for; the system grants ``receive_buffer`` of it.

    Raises:
        ConfigError: sizes that cannot be, or the port is taken, or the address is not this machine's.
        CapabilityError: not a 64-bit little-endian Linux.
    """

    name = "udp"

    def __init__(
        self,
        address: str,
        port: int | Sequence[int],
        width: int,
        sum_rows: int,
        result_rows: int,
        *,
        receive_buffer: int = 16 << 20,
    ) -> None:
        if not SUPPORTED:
            raise CapabilityError("the udp datapath needs 64-bit little-endian Linux: run it on x86-64 or arm64")
        self._closed = True
        arrays = allocate(width, sum_rows, result_rows)
        self.store = store_of(arrays)
        self._tables = Tables(arrays)
        self.socket = self._open(address, port, receive_buffer)
        self._wake, self._events, self._controls = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(3))
        self._closed = False
        keep_from_children(self)
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        """Starts the receiving thread, which keeps all memory that it works on alive."""
        memory, iovecs, names, controls, buffers = messages(BATCH, BUFFER_BYTES)
        fds = (self.socket.fileno(), self._wake, self._events, self._controls)
        arguments = (self._tables.context, *fds, memory, names, controls, buffers)
        self._tables.state[STOP] = 1
        receive(*arguments)  # compiles, or loads the cache, before any packet is due
        self._tables.state[STOP] = 0
        thread = threading.Thread(
            target=_receive, args=(arguments, self._tables, iovecs), name="tailbound-udp", daemon=True
        )
        thread.start()
        return thread

    def _open(self, address: str, port: int | Sequence[int], receive_buffer: int) -> UdpSocket:
        sock = UdpSocket()
        try:
            _bind(sock, address, [port] if isinstance(port, int) else port)
        except BaseException:
            sock.close()
            raise
        reserve(sock, socket.SO_RCVBUF, receive_buffer)
        reserve(sock, socket.SO_SNDBUF, 4 << 20)
        sock.setsockopt(socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
        with contextlib.suppress(OSError):  # before Linux 5.0: one packet a receive, slower
            sock.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
        sock.setblocking(False)
        return sock

    def descriptors(self) -> list[int]:
        """See ``forks.Owner``."""
        return [] if self._closed else [self.socket.fileno(), self._wake, self._events, self._controls]

    def sending(self, peers: int, ports: int = 0) -> list[UdpSocket]:
        """See ``Datapath.sending``; one socket, since nothing is gained by more where one thread receives."""
        return [self.socket]

    @property
    def endpoint(self) -> tuple[str, int]:
        """Own (IPv4 address, port) as bound."""
        host, port = self.socket.getsockname()
        return host, port

    @property
    def receive_buffer(self) -> int:
        """Bytes of receive buffer that the system granted (it counts its own overhead in)."""
        return self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    @property
    def gap(self) -> int:
        """See ``Datapath.gap``.

        All ranks ask for the same buffer, so the own one tells what peers have. Where it is small, and more so where
        ranks share cores, a sender that never pauses fills it before the receiver is even scheduled.
        """
        return 0 if self.receive_buffer >= _AMPLE_BUFFER else _GAP

    @property
    def lost_on_arrival(self) -> Mapping[str, int]:
        """See ``Datapath.lost_on_arrival``.

        ``receive_buffer``: the full socket buffer; a GRO super-packet counts once, and is known at the next packet.
        ``control_queue``: control packets, because nobody fetched the ones before.
        """
        state = self._tables.state
        return {"receive_buffer": int(state[KERNEL_DROPS]), "control_queue": int(state[CONTROLS_LOST])}

    def reset(self, first_op: int) -> None:
        """Seals every slot below ``first_op``; called before ``control.active`` is set to 1."""
        self._tables.seal((first_op - 1) & 0xFFFFFFFF, 0, self.store.sum_rows)

    def seal(self, op: int, seq: int, rows: int) -> None:
        """Makes contributions to ``rows`` slots from row sequence ``seq`` late for ``op`` and everything older.

        Taken in under the same mutex: when it returns, nobody is adding.
        """
        self._tables.seal(op, seq, rows)

    def fds(self) -> tuple[int, int]:
        """Readable when there are events or control packets, respectively."""
        return (self._events, self._controls)

    def events(self) -> list[EventRecord]:
        """Events since the last call; never blocks."""
        self._clear(self._events)
        return [EventRecord(*entry) for entry in self._tables.take_events()]

    def control_packets(self) -> list[bytes]:
        """UDP payloads of control packets since the last call; never blocks. Their checks have been verified."""
        self._clear(self._controls)
        return self._tables.take_controls()

    def fence(self) -> None:
        """Waits for the buffer in hand: what was present before the call is whole and visible after it.

        The mutex is the barrier, on every architecture; the XDP side needs membarrier for this.
        """
        with self._tables.mutex:
            pass

    def close(self) -> None:
        """Ends the thread and closes socket and descriptors; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._tables.state[STOP] = 1
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self.socket.close()
        for fd in (self._wake, self._events, self._controls):
            os.close(fd)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    @staticmethod
    def _clear(fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(fd)
