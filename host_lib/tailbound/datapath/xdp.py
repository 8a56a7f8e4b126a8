"""The datapath in the kernel: XDP programs on this rank's interface fill the maps, this class gives them a face.

``XdpDatapath.attach`` does all of it in this process (the program goes with it); ``pin`` is the privileged half alone
and ``open`` the unprivileged one. ``attach`` and ``detach`` pin in the user's terms: MiB, an MTU, a group's name.
"""

# ruff: noqa: D102 - ``protocol.Datapath`` and ``forks.Owner`` say what their methods do
from __future__ import annotations

import contextlib
import grp
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.datapath.protocol import Store, layouts, ring_rows, store_of, sum_ring
from tailbound.errors import AttachError, CapabilityError, ConfigError
from tailbound.forks import keep_from_children
from tailbound.kernel import attach as attaching
from tailbound.kernel import barrier, load, net, pin, syscalls
from tailbound.kernel import compile as compile_
from tailbound.kernel import maps as kernel_maps
from tailbound.kernel.events import EventRing
from tailbound.kernel.fanout import Fanout
from tailbound.kernel.linear import linear_of
from tailbound.kernel.maps import EVENTS, PROGRAMS, Maps, Shape, put_key
from tailbound.kernel.net import interface as look_up
from tailbound.kernel.pin import Receiver
from tailbound.transport.config import DEFAULT_PORT, Config, row_width
from tailbound.transport.sockets import SOCKETS, UdpSocket, bound_socket, ports_of, room_of, sending_socket
from tailbound.wire.address import Words, endpoint, family_name, ip_bytes, is_ipv6, text_of, words_of
from tailbound.wire.schema import ACTIVE_WITH_SOCKET, KEY_EPOCHS, WORKER_MAPS, key_bytes

log = logging.getLogger("tailbound")

#: Bytes asked for the buffer that control packets come into, and how many of them a turn takes at most.
_RECEIVE_BYTES = 8 << 20

#: Arrays with an entry for each row of the sums ring.
_BY_SUM_ROW = tuple(m.name for m in WORKER_MAPS if m.mmap and m.entries == ("sum_rows",))
#: Maps that a trainer needs: what is mmapped, the seals, the keys and the events.
PINNED = (*(m.name for m in WORKER_MAPS if m.mmap or m.writer != "program"), EVENTS)


def shapes(width: int, sum_rows: int, result_rows: int) -> dict[str, Shape]:
    """``protocol.layouts`` on this machine."""
    return layouts(width, sum_rows, result_rows, kernel_maps.possible_cpus())


def _shapes_of(asked: Receiver) -> dict[str, Shape]:
    return shapes(asked.width, asked.sum_rows, asked.result_rows)


class _Loaded(NamedTuple):
    """Maps, the program that fills them and its link (-1: pinned ones), and whether a job may have a key."""

    maps: Maps
    program: int
    link: int
    tagged: bool

    def close(self) -> None:
        self.maps.close(self.link, self.program)


class XdpDatapath:
    """See ``protocol.Datapath``."""

    name = "xdp"
    #: the kernel takes packets in as they come, until the job's socket is gone
    gap, active = 0, ACTIVE_WITH_SOCKET

    def __init__(self, asked: Receiver, loaded: _Loaded, address: str) -> None:
        self.interface, self.endpoint = asked.interface, (address, asked.port)
        self._loaded, self.maps = loaded, loaded.maps
        try:
            self.store: Store = store_of(self.maps.arrays)
            self.source = EventRing(self.maps.fds[EVENTS], self.maps.fds["slot_locks"], self.store.sum_rows)
            self.socket = bound_socket(
                address, [asked.port], _RECEIVE_BYTES,
                "or another interface, since the xdp datapath takes one rank and one job an interface. Or end the "
                f"process that `ss -ulnp sport = :{asked.port}` names, or take the udp datapath "
                "(TAILBOUND_DATAPATH=udp)",
            )  # fmt: skip
            self.source.socket, self.source.peers = self.socket.fileno(), self.store.peers.ctypes.data
            self._end_job()
        except BaseException:
            loaded.close()
            raise
        self._sending: list[UdpSocket] = []
        self._closed = False
        #: the pins that were opened; None: the program is this process's own
        self._pins = pin.identity(self.interface) if loaded.program < 0 else None
        keep_from_children(self)

    @property
    def withdrawn(self) -> bool:
        """Pins are gone, or others: ``tailbound detach``, ``attach --replace``. Nothing is written to these maps."""
        return self._pins is not None and pin.identity(self.interface) != self._pins

    @property
    def lost_on_arrival(self) -> Mapping[str, int]:
        """``strange_source``: control packets that the program has not seen (IP options, fragments, another interface)
        and that are not from their sender's address. What is lost in front of it the driver counts (``ethtool -S``).
        """
        return {"strange_source": self.source.strange} if self.source.strange else {}

    def descriptors(self) -> list[int]:
        if self._closed:
            return []
        sockets = (sock.fileno() for sock in (self.socket, *self._sending))
        loaded = self._loaded
        return [fd for fd in (*sockets, *self.maps.fds.values(), loaded.program, loaded.link) if fd >= 0]

    @classmethod
    def attach(cls, asked: Receiver, loader: str = "auto", *, keyed: bool = False, address: str = "") -> XdpDatapath:
        """Makes maps, loads and attaches the program; all of it goes when this process ends.

        Args:
            asked: what to receive.
            loader: ``auto``, ``object``, ``bcc`` or ``clang``.
            keyed: for a job with a key, which takes a second program; others need not wait for it.
            address: of the interface, by which peers reach it; empty: its first.

        Raises:
            ConfigError: interface, port or sizes that cannot be.
            CapabilityError: compiler, privilege or kernel feature missing.
            AttachError: the interface refuses, or a program is there.
        """
        address = address or net.address_of(asked.interface, ipv6=asked.ipv6)
        return cls(asked, _attach(asked, loader, keyed=keyed), address)

    @classmethod
    def pin(cls, asked: Receiver, loader: str = "auto", group: int = 0, *, replace: bool = False) -> None:
        """Attaches for good, for processes of ``group`` (a group id) to ``open``. Errors: see ``attach``.

        Args:
            replace: what is pinned there gives way, once the new program is known to load.
        """
        pin.mount()
        pin.refuse_elsewhere(asked.interface)
        with contextlib.closing(_attach(asked, loader, keyed=True, replace=replace)) as loaded:
            found = pin.Settings(
                **asdict(asked),
                prog_id=syscalls.prog_info(loaded.program).id,
                vlan=net.device_of(asked.interface).vlan,
                signature=compile_.signature(),
                tagged=loaded.tagged,
                index=net.index_of(asked.interface),
            )
            fds = {name: loaded.maps.fds[name] for name in (*PINNED, PROGRAMS)}
            pin.pin(found, fds, loaded.link, group)

    @classmethod
    def is_ours(cls, interface: str) -> bool:
        """Whether a program of Tailbound's is on ``interface``, as far as this user may know."""
        there = net.xdp_below(interface)
        return there is not None and attaching.program_name(there.prog_id) in attaching.OURS

    @classmethod
    def open(cls, interface: str, workers: int = 1, address: str = "") -> XdpDatapath:
        """Opens pinned maps; needs no privilege but the files' group.

        Args:
            workers: world size; the job uses as much of the sums ring as it needs.
            address: of the interface, by which peers reach it, where it is of the program's family; else the first
                that is.

        Raises:
            AttachError: nothing is attached and pinned.
            CapabilityError: the pins may not be opened.
        """
        found = pin.settings(interface)
        if found is None:
            raise AttachError(f"nothing is attached and pinned on {interface}: run `sudo tailbound attach {interface}`")
        maps = Maps(pin.open_pins(interface, PINNED))
        try:
            dims = _shapes_of(found)
            for map_ in WORKER_MAPS:
                if map_.mmap:
                    maps.map_array(map_, dims[map_.name])
            rows = min(found.sum_rows, sum_ring(found.result_rows, workers))
            for name in _BY_SUM_ROW:
                maps.arrays[name] = maps.arrays[name][:rows]
            if not address or is_ipv6(address) != found.ipv6:
                address = net.address_of(interface, ipv6=found.ipv6)
        except BaseException:
            maps.close()
            raise
        path = cls(found, _Loaded(maps, -1, -1, found.tagged), address)
        try:
            Fanout.stop(interface)  # it has the job's port by now: what else is there is of one that was killed
        except BaseException:
            path.close()
            raise
        return path

    def reset(self, first_op: int) -> None:
        """What the program let in before must not reach a row of the new job."""
        barrier.grace_period()
        self.source.seal((first_op - 1) & 0xFFFFFFFF, 0, self.store.sum_rows)

    def put_key(self, epoch: int, key: NDArray[np.uint64]) -> None:
        if not self._loaded.tagged:
            raise CapabilityError(
                f"the kernel refused the program for packets with tags when {self.interface} was attached: use the udp "
                'datapath (datapath="udp"), a newer kernel, or no key_file'
            )
        put_key(self.maps.fds["keys"], epoch, key)

    def fds(self) -> tuple[int, int]:
        return self.maps.fds[EVENTS], self.socket.fileno()

    def sending(self, peers: int) -> list[UdpSocket]:
        """Peers know this rank by its address alone, so that any source port will do."""
        count = min(peers * ports_of(peers), SOCKETS)
        self._sending += [sending_socket(self.endpoint[0], room_of(count)) for _ in range(count)]
        return [self.socket, *self._sending]

    def _end_job(self) -> None:
        """Lets no more packets in, and leaves no key: a pinned program and its maps stay (kernel-5)."""
        self.store.control["active"] = 0
        self.store.control["tagged"] = 0
        for epoch in range(KEY_EPOCHS) if self._loaded.tagged else ():
            put_key(self.maps.fds["keys"], epoch, np.zeros(key_bytes(self.store.width) // 8, np.uint64))

    def close(self) -> None:
        """A pinned program stays. Arrays of ``store`` end with it."""
        if self._closed:
            return
        self._closed = True
        self._end_job()
        for sock in (self.socket, *self._sending):
            sock.close()
        self.source.close()
        self._loaded.close()


def _attach(asked: Receiver, loader: str, *, keyed: bool, replace: bool = False) -> _Loaded:
    """Makes maps, loads the program and attaches it; with ``replace``, what is pinned goes in between."""
    if not 0 < asked.port < 65536:
        raise ConfigError(f"UDP port {asked.port}: choose one of 1..65535")
    device, vlan = net.device_of(asked.interface)
    if not replace:
        attaching.refuse_occupied(device)
    maps = kernel_maps.create(WORKER_MAPS, _shapes_of(asked), events=True, node=net.numa_node(device))
    program = link = -1
    try:
        control = maps.arrays["control"]
        with contextlib.suppress(ConfigError):  # without an address yet, packets to all on our port pass the program
            control["address"], control["prefix"] = words_of(net.address_of(asked.interface, ipv6=asked.ipv6))
        defines = load.receiver_defines(asked.port, asked.width, asked.result_rows, vlan, ipv6=asked.ipv6)
        program = load.load_worker(maps.fds, defines, loader)
        tagged = keyed and _load_tagged(maps, defines, loader)
        if replace:
            pin.remove(asked.interface)
        link = attaching.attach(program, device)
    except BaseException:
        maps.close(link, program)
        raise
    return _Loaded(maps, program, link, tagged)


def _load_tagged(maps: Maps, defines: Mapping[str, int], loader: str) -> bool:
    """Whether jobs with a key can be had: a kernel that refuses that program serves all others."""
    try:
        load.load_tagged(maps.fds, defines, loader)
    except CapabilityError as error:
        log.warning("no job with a key can run here: %s", str(error).splitlines()[0])
        return False
    return True


def attach(
    interface: str,
    *,
    port: int = DEFAULT_PORT,
    mtu: int | None = None,
    ring_mib: float = Config.ring_mib,
    workers: int = 2,
    group: str | None = None,
    loader: str = "auto",
    replace: bool = False,
    ipv6: bool = False,
) -> str:
    """Attaches for good, so that processes of ``group`` can train without privileges.

    Args:
        interface: its name.
        port: UDP port of the job.
        mtu: of the path, in bytes; None takes the interface's.
        ring_mib: result ring in MiB.
        workers: smallest world size to come; a job of more uses only as much of the sums ring as it needs.
        group: name or number; None leaves the maps to root.
        loader: ``auto``, ``object``, ``bcc`` or ``clang``.
        ipv6: for jobs over IPv6; an interface without an address of IPv4 needs no word.
        replace: what ``attach`` has attached before, of another version or with other settings, gives way once the new
            program is known to load; a rank that trains there ends with an error. What is as asked stays.

    Returns:
        One line that says what there is now.

    Raises:
        ConfigError: interface, port, MTU, ring, world size or group that cannot be.
        CapabilityError: compiler, privilege or kernel feature missing.
        AttachError: the interface refuses, or a program is there.
    """
    found = look_up(interface, ipv6=True if ipv6 else None)
    ipv6 = is_ipv6(found.address)
    if mtu is not None and mtu > found.mtu:
        raise ConfigError(f"MTU {mtu} is above that of {interface}, {found.mtu}: give at most that")
    width = row_width(0, found.mtu if mtu is None else mtu, linear=linear_of(interface), ip=ip_bytes(found.address))
    asked = Receiver(interface, port, width, *ring_rows(ring_mib, width, workers), ipv6)
    number = _group(group)
    pin.sweep()
    if replace and pin.is_as_asked(asked, number):
        return f"{interface} is attached already as asked, by this version: nothing was done"
    XdpDatapath.pin(asked, loader, number, replace=replace)
    try:
        Fanout.pin(interface, port, loader, number, ipv6=ipv6)
        results = "one send for all peers"
    except CapabilityError as error:  # training does without: older kernels cannot pin it
        results = f"a send for every peer ({str(error).splitlines()[0]})"
    total = sum(kind.itemsize * math.prod(dims) for kind, dims in _shapes_of(asked).values())
    return (
        f"attached to {interface}, UDP port {port} of {family_name(found.address)}: rows of {width} codes, "
        f"{asked.sum_rows} sum rows, {asked.result_rows} result rows, {total / 2**20:.1f} MiB; results: {results}; "
        f"for {'root' if group is None else f'group {group}'}"
    )


def detach(interface: str, *, force: bool = False) -> bool:
    """Detaches what ``attach`` attached and removes every remainder, those of vanished interfaces too.

    Args:
        force: also where a job receives there, which ends its rank with an error.

    Returns:
        Whether anything of ``interface`` was there.

    Raises:
        ConfigError: nothing was there, and there is no such interface.
        AttachError: a job receives there.
        CapabilityError: no privilege to.
    """
    if not force and (where := _in_use(interface)):
        raise AttachError(
            f"a job receives at {where}, by the program on {interface}: end it first, or run `tailbound detach "
            f"{interface} --force`, which ends its rank with an error"
        )
    removed = pin.remove(interface)
    pin.sweep()
    if not removed:
        net.index_of(interface)
    return removed


def _in_use(interface: str) -> str:
    """Where a job receives by what is pinned for ``interface``; empty: there is none, as far as can be told."""
    try:
        found = pin.settings(interface)
        if found is None:
            return ""
        maps = Maps(pin.open_pins(interface, ("control",)))
    except (AttachError, ConfigError):
        return ""
    with contextlib.closing(maps):
        maps.map_array(WORKER_MAPS[0], _shapes_of(found)["control"])
        control = maps.arrays["control"][0]
        first, second, third = control["prefix"].tolist()
        address = text_of(Words(int(control["address"]), (first, second, third)))
        active = bool(control["active"])
        del control
        return endpoint(address, found.port) if active and net.is_taken(address, found.port) else ""


def _group(name: str | None) -> int:
    if name is None:
        return 0
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"no group {name!r} on this machine: make it (groupadd {name}) or give another") from None
