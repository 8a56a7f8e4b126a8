"""The datapath in the kernel: XDP programs on this rank's interface fill the maps, this class gives them a face.

``attach`` does all of it in this process (the program goes with it); ``pin`` is the privileged half alone and
``open`` the unprivileged one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Mapping

from tailbound.datapath.buffers import reserve
from tailbound.datapath.protocol import EventRecord, Store
from tailbound.datapath.sizes import sum_ring
from tailbound.datapath.store import check_sizes, store_of
from tailbound.errors import AttachError, ConfigError
from tailbound.forks import keep_from_children
from tailbound.kernel import attach as attaching
from tailbound.kernel import barrier, interfaces, load, pin
from tailbound.kernel import maps as kernel_maps
from tailbound.kernel.events import EventRing
from tailbound.kernel.maps import EVENTS, Maps, Shape
from tailbound.kernel.seal import Sealer
from tailbound.transport.sockets import UdpSocket
from tailbound.wire.packets import layout
from tailbound.wire.schema import HEADER_BYTES, WORKER_MAPS

#: Bytes asked for the control socket's buffer; the kernel may give less without CAP_NET_ADMIN.
_RECEIVE_BYTES = 8 << 20
#: Bytes asked for the buffers of all sockets that bursts leave over, and of one at least (two super-frames); how many
#: sockets, and how many of them for one peer unless more are asked for.
_SEND_BYTES, _SEND_LEAST, _SOCKETS, _PORTS = 1 << 20, 160 << 10, 16, 4
#: How often consecutive ports are looked for.
_ATTEMPTS = 16
#: Arrays with an entry for each row of the sums ring.
_BY_SUM_ROW = tuple(m.name for m in WORKER_MAPS if m.mmap and m.entries == ("sum_rows",))
#: Maps that a trainer needs: what is mmapped, the seals and the events.
PINNED = (*(m.name for m in WORKER_MAPS if m.mmap or m.writer != "program"), EVENTS)


def shapes(width: int, sum_rows: int, result_rows: int) -> dict[str, Shape]:
    """Dtype and shape of every worker map on this machine.

    Raises:
        ConfigError: sizes that cannot be.
    """
    check_sizes(width, sum_rows, result_rows)
    sizes = {"width": width, "sum_rows": sum_rows, "result_rows": result_rows, "cpus": interfaces.possible_cpus()}
    return {m.name: layout(m, **sizes) for m in WORKER_MAPS}


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
        asked: so many, as far as ``_SOCKETS`` last; 0: as above.
    """
    return max(1, min(asked or min(_PORTS, _SEND_BYTES // _SEND_LEAST // peers), _SOCKETS // peers))


def sending_sockets(address: str, count: int) -> list[UdpSocket]:
    """``count`` UDP sockets for bursts, with ports of their own and ``_SEND_BYTES`` of room together.

    More room would be a standing queue behind a slow link; with less the link idles while a busy host gets round to
    the next burst.
    """
    return [sending_socket(address, room_of(count)) for _ in range(count)]


def room_of(count: int) -> int:
    """Bytes of room for one of ``count`` sockets, or for one of whose bursts ``count`` copies are made."""
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


class XdpDatapath:
    """See ``datapath.protocol.Datapath``. ``socket`` is bound to ``endpoint`` and may be used for sending."""

    name = "xdp"
    #: the kernel takes packets in as they come
    gap = 0
    #: what is lost before the program sees it the driver counts (``ethtool -S``)
    lost_on_arrival: Mapping[str, int] = {}

    def __init__(self, maps: Maps, interface: str, port: int, program: int = -1, link: int = -1) -> None:
        self.interface = interface
        self.maps = maps
        self.store: Store = store_of(maps.arrays)
        self.program = program
        self.endpoint = (interfaces.address_of(interface), port)
        self._link = link
        self._sealer = Sealer(maps.fds["slot_locks"], self.store.sum_rows)
        self._ring = EventRing(maps.fds[EVENTS])
        barrier.register()
        self.socket = bound_socket(*self.endpoint)
        self._sending: list[UdpSocket] = []
        self._closed = False
        keep_from_children(self)

    def descriptors(self) -> list[int]:
        """See ``forks.Owner``."""
        if self._closed:
            return []
        sockets = (sock.fileno() for sock in (self.socket, *self._sending))
        return [fd for fd in (*sockets, *self.maps.fds.values(), self.program, self._link) if fd >= 0]

    @classmethod
    def attach(
        cls,
        interface: str,
        port: int,
        width: int = 1408,
        sum_rows: int = 4096,
        result_rows: int = 8192,
        loader: str = "auto",
        mode: str = "native",
    ) -> XdpDatapath:
        """Makes maps, loads and attaches the program; all of it goes when this process ends.

        Args:
            width: W, codes of a full row; a multiple of 64.
            sum_rows, result_rows: rows of the rings; powers of two.
            loader: ``auto``, ``bcc`` or ``clang``.

        Raises:
            ConfigError: interface, port or sizes that cannot be.
            CapabilityError: compiler, privilege or kernel feature missing.
            AttachError: the interface refuses, or a program is there.
        """
        maps, program, link = _attach(interface, port, width, sum_rows, result_rows, loader, mode)
        try:
            return cls(maps, interface, port, program, link)
        except BaseException:
            _close(maps, program, link)
            raise

    @classmethod
    def pin(
        cls,
        interface: str,
        port: int,
        width: int = 1408,
        sum_rows: int = 4096,
        result_rows: int = 8192,
        loader: str = "auto",
        mode: str = "native",
        group: int = 0,
    ) -> None:
        """Attaches for good, for processes of ``group`` (a group id) to ``open``. Arguments and errors: ``attach``."""
        maps, program, link = _attach(interface, port, width, sum_rows, result_rows, loader, mode)
        try:
            there = interfaces.xdp_on(interface)
            if there is None:
                raise AttachError(
                    f"{interface} lost its program while it was pinned: did somebody remove it? Try again"
                )
            found = pin.Settings(interface, port, width, sum_rows, result_rows, there.prog_id)
            pin.pin(found, {name: maps.fds[name] for name in PINNED}, link, group)
        finally:
            _close(maps, program, link)

    @classmethod
    def is_attached(cls, interface: str) -> bool:
        """Whether ``open`` would find pins with a program behind them.

        Raises:
            ConfigError: no such interface.
            AttachError: pinned by another version of Tailbound.
            CapabilityError: there is a program, and this user may not look whose pins are there.
        """
        return pin.settings(interface) is not None

    @classmethod
    def is_ours(cls, interface: str) -> bool:
        """Whether a program of Tailbound's is on ``interface``, as far as this user may know."""
        there = interfaces.xdp_on(interface)
        return there is not None and attaching.program_name(there.prog_id) in attaching.OURS

    @classmethod
    def open(cls, interface: str, workers: int = 1) -> XdpDatapath:
        """Opens pinned maps; needs no privilege but the files' group.

        Args:
            workers: world size; the job uses as much of the sums ring as it needs.

        Raises:
            AttachError: nothing is attached and pinned.
            CapabilityError: the pins may not be opened.
        """
        found = pin.settings(interface)
        if found is None:
            raise AttachError(f"nothing is attached and pinned on {interface}: run `sudo tailbound attach {interface}`")
        maps = Maps(pin.open_pins(interface, PINNED))
        try:
            dims = shapes(found.width, found.sum_rows, found.result_rows)
            for map_ in WORKER_MAPS:
                if map_.mmap:
                    maps.map_array(map_, dims[map_.name])
            rows = min(found.sum_rows, sum_ring(found.result_rows, workers))
            for name in _BY_SUM_ROW:
                maps.arrays[name] = maps.arrays[name][:rows]
            return cls(maps, interface, found.port)
        except BaseException:
            maps.close()
            raise

    def reset(self, first_op: int) -> None:
        """Seals every slot below ``first_op``; called before ``control.active`` is set to 1."""
        self._sealer.seal((first_op - 1) & 0xFFFFFFFF, 0, self.store.sum_rows)

    def seal(self, op: int, seq: int, rows: int) -> None:
        """Makes contributions to ``rows`` slots from row sequence ``seq`` late for ``op`` and everything older.

        When it returns, nobody is adding to them for that op.
        """
        self._sealer.seal(op, seq, rows)

    def fds(self) -> tuple[int, int]:
        """File descriptors that become readable when there are events or control packets."""
        return self.maps.fds[EVENTS], self.socket.fileno()

    def events(self) -> list[EventRecord]:
        """Events since the last call; never blocks."""
        return [EventRecord(*event) for event in self._ring.drain()]

    def control_packets(self) -> list[bytes]:
        """UDP payloads (header and body) of control packets since the last call, unverified; never blocks."""
        out = []
        try:
            while True:
                out.append(self.socket.recv(HEADER_BYTES + self.store.width))
        except BlockingIOError:
            return out

    def sending(self, peers: int, ports: int = 0) -> list[UdpSocket]:
        """See ``Datapath.sending``; peers know this rank by its address alone, so that any source port will do."""
        self._sending += sending_sockets(self.endpoint[0], min(peers * ports_of(peers, ports), _SOCKETS))
        return [self.socket, *self._sending]

    def fence(self) -> None:
        """Full memory barrier between reading ``presence`` and reading the rows it names."""
        barrier.full()

    def close(self) -> None:
        """Detaches (unless pinned), unmaps and closes; may be called twice. Arrays of ``store`` end with it."""
        if self._closed:
            return
        self._closed = True
        for sock in (self.socket, *self._sending):
            sock.close()
        self._ring.close()
        _close(self.maps, self.program, self._link)


def _attach(
    interface: str, port: int, width: int, sum_rows: int, result_rows: int, loader: str, mode: str
) -> tuple[Maps, int, int]:
    if not 0 < port < 65536:
        raise ConfigError(f"UDP port {port}: choose one of 1..65535")
    interfaces.index_of(interface)
    attaching.refuse_occupied(interface)
    dims, node = shapes(width, sum_rows, result_rows), interfaces.numa_node(interface)
    maps = kernel_maps.create(WORKER_MAPS, dims, events=True, node=node)
    program = link = -1
    try:
        maps.arrays["control"]["address"] = _own_address(interface)
        program = load.load_worker(maps.fds, port=port, width=width, result_rows=result_rows, loader=loader)
        link = attaching.attach(program, interface, mode)
    except BaseException:
        _close(maps, program, link)
        raise
    return maps, program, link


def _own_address(interface: str) -> int:
    """What the program takes for this host's address until a job tells it: packets to others on our port pass it.

    0 where the interface has none yet: then they all do.
    """
    try:
        return int.from_bytes(socket.inet_aton(interfaces.address_of(interface)), sys.byteorder)
    except ConfigError:
        return 0


def _close(maps: Maps, program: int, link: int) -> None:
    for fd in (link, program):
        if fd >= 0:
            os.close(fd)
    maps.close()
