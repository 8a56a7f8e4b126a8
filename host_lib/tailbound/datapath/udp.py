"""The udp datapath: a socket and the C library instead of XDP. No privileges; the same rules, in the same sources.

A thread receives super-packets (UDP GRO) and takes them in, in one call without the GIL for the life of the socket.
Python would have to take the GIL back after every system call, and while a training loop holds it for its 5 ms a
receive buffer of 208 KiB overflows. So waiting, receiving, taking in and waking Python all happen in there.

As in the kernel, a rank is known by its address, whatever source port it sends from. Several ranks may live on one
address: packets name their sender, and each rank receives at a port of its own. The sender shares the socket: it is one
reader that takes all.
"""

# ruff: noqa: D102 - ``protocol.Datapath`` and ``forks.Owner`` say what their methods do
from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.datapath.protocol import allocate, store_of
from tailbound.forks import keep_from_children
from tailbound.kernel.core import Core, core
from tailbound.kernel.events import Source
from tailbound.transport.sockets import UdpSocket, bound_socket, buffer_of, reserve, room_of, with_option
from tailbound.wire import schema

#: Below this many bytes of receive buffer (three or four super-packets fit into 208 KiB) senders must leave gaps.
_AMPLE_BUFFER = 2 << 20
_GAP = 60_000  # ns between bursts; longer gaps lost no fewer, shorter ones more, and no gap was no faster
#: ``<linux/udp.h>``, ``<asm-generic/socket.h>``
UDP_GRO, _SO_RXQ_OVFL = 104, 40
#: Of the ring of events (``host_lib/core/user.h``).
_EVENT_BYTES = 1024 * 32
#: Words of the state (``struct tb_state``). An event that does not fit its queue is a hint lost; packets are counted.
EVENT_HEAD, EVENT_TAIL, CONTROL_HEAD, CONTROL_TAIL, EVENTS_LOST, CONTROLS_LOST, STOP, KERNEL_DROPS = range(8)
#: A map as the library knows it (``struct tb_map``).
_MAP = np.dtype([("values", "=u8"), ("entries", "=u8"), ("bytes", "=u8")])


class Tables:
    """What the C library fills (``core``): arrays of ``protocol.allocate``, queues of events and control packets.

    None but ``receive`` drops the GIL: none waits for more than the buffer that the receiver has in hand, and the
    receiver never waits for the GIL. ``library``: another one than ``core.core``.

    Raises:
        CapabilityError: see ``core.core``.
        MemoryError: there is none.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], library: Core | None = None) -> None:
        result_rows, width = arrays["results"].shape
        self.arrays = dict(arrays)
        self.state, self._events = np.zeros(8, np.int64), np.zeros(_EVENT_BYTES, np.uint8)
        self._core = library or core()
        maps = np.array([_described(arrays[m.name], m) for m in schema.WORKER_MAPS], _MAP)
        #: what functions of the library take; valid as long as this object is
        self.address: int = self._core.fast.tb_open(
            maps.ctypes.data, width, result_rows, self.state.ctypes.data, self._events.ctypes.data
        )
        if not self.address:
            raise MemoryError("no memory for queues of control packets")
        positions = (self.state[at:].ctypes.data for at in (EVENT_TAIL, EVENT_HEAD))
        self.source = Source(self.address, *positions, self._events.ctypes.data, _EVENT_BYTES - 1)
        self.source.library = self._core
        # not at exit, when the receiver may still be at work
        weakref.finalize(self, self._core.fast.tb_close, self.address).atexit = False

    def receive(self, *fds: int) -> None:
        """Receives until ``state[STOP]`` is set and the thread is woken up, without the GIL; ``fds`` as of ``tb_udp``.

        Raises:
            MemoryError: there is none for buffers.
        """
        if self._core.waits.tb_udp(self.address, *fds):
            raise MemoryError("no memory for received datagrams")

    def put_key(self, epoch: int, key: NDArray[np.uint64]) -> None:
        """``key`` (``wire.tag``) is in force from now on, in the place of the one two epochs before."""
        self._core.fast.tb_put_key(self.address, epoch, key.ctypes.data, len(key))


def _described(array: NDArray[Any], map_: schema.Map) -> tuple[int, int, int]:
    """Address, entries and bytes of an entry; a map's columns are those of its values."""
    entries = array.size // (array.shape[-1] if map_.width else 1)
    return array.ctypes.data, entries, array.nbytes // entries


class UdpDatapath:
    """See ``protocol.Datapath``: receives on ``address``:``port`` and sums in user space.

    Args:
        address: own IP address.
        port: own UDP port, or several, of which the first free one is taken; 0: any.
        width: codes of a row at most, a multiple of 64.
        sum_rows: rows of the sums ring, a power of two.
        result_rows: rows of the result ring, a power of two.
        receive_buffer: bytes of socket buffer to ask for; the system may grant less.

    Raises:
        ConfigError: sizes that cannot be, or the port is taken, or the address is not this machine's.
        CapabilityError: no C library (``core.core``).
    """

    name = "udp"
    interface = ""
    active = 1
    #: sockets are this process's own
    withdrawn = False

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
        self._closed = True
        arrays = allocate(width, sum_rows, result_rows)
        self.store = store_of(arrays)
        self._tables = tables = Tables(arrays)
        self.source = tables.source
        self.put_key = tables.put_key
        self.socket = self._open(address, port, receive_buffer)
        self._wake, self._events, self._controls = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(3))
        self._closed = False
        keep_from_children(self)
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        """Starts the receiving thread, which keeps the tables alive."""
        fds = (self.socket.fileno(), self._wake, self._events, self._controls)
        thread = threading.Thread(target=self._tables.receive, args=fds, name="tailbound-udp", daemon=True)
        thread.start()
        return thread

    def _open(self, address: str, port: int | Sequence[int], receive_buffer: int) -> UdpSocket:
        ports = [port] if isinstance(port, int) else port
        sock = bound_socket(address, ports, receive_buffer, "or 0 for any (port=, TAILBOUND_PORT)")
        reserve(sock, socket.SO_SNDBUF, room_of(1))
        lack = "packets lost in full socket buffers are not counted"
        with_option(sock, (socket.SOL_SOCKET, _SO_RXQ_OVFL), 1, "SO_RXQ_OVFL", lack)
        lack = "marks of routers (ECN) are not seen, so senders slow down by losses alone"
        if sock.family == socket.AF_INET6:
            with_option(sock, (socket.IPPROTO_IPV6, socket.IPV6_RECVTCLASS), 1, "IPV6_RECVTCLASS", lack)
        else:
            with_option(sock, (socket.IPPROTO_IP, socket.IP_RECVTOS), 1, "IP_RECVTOS", lack)
        lack = "one packet is received at a time, which takes more processor time"  # before Linux 5.0, too
        with_option(sock, (socket.IPPROTO_UDP, UDP_GRO), 1, "UDP_GRO", lack)
        return sock

    def descriptors(self) -> list[int]:
        return [] if self._closed else [self.socket.fileno(), self._wake, self._events, self._controls]

    def sending(self, peers: int) -> list[UdpSocket]:
        """One socket, since nothing is gained by more where one thread receives."""
        return [self.socket]

    @property
    def endpoint(self) -> tuple[str, int]:
        """Own (IP address, port) as bound."""
        host, port, *_ = self.socket.getsockname()
        return host, port

    @property
    def gap(self) -> int:
        """All ranks ask for the same buffer, so the own one tells what peers have. Where it is small, and more so where
        ranks share cores, a sender that never pauses fills it before the receiver is even scheduled.
        """
        return 0 if buffer_of(self.socket, socket.SO_RCVBUF) >= _AMPLE_BUFFER else _GAP

    @property
    def lost_on_arrival(self) -> Mapping[str, int]:
        """``receive_buffer``: the full socket buffer; a GRO super-packet counts once, and is known at the next packet.
        ``control_queue``: control packets, because nobody fetched the ones before.
        """
        state = self._tables.state
        return {"receive_buffer": int(state[KERNEL_DROPS]), "control_queue": int(state[CONTROLS_LOST])}

    def reset(self, first_op: int) -> None:
        self.source.seal((first_op - 1) & 0xFFFFFFFF, 0, self.store.sum_rows)

    def fds(self) -> tuple[int, int]:
        return (self._events, self._controls)

    def close(self) -> None:
        """Ends the thread, too."""
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
