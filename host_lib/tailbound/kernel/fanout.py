"""One burst to all (kernel-23): what leaves a registered UDP socket for the lead peer is cloned for the other peers.

::

    fanout = Fanout.attach("eth0", sock.getsockname()[1], 5515)      # or Fanout.open where it is pinned
    fanout.set_peers(own, {rank: address, ...})
    fanout.live({1, 2, 3})
    sock.sendmsg([burst], gso, 0, (address, port) of fanout.lead)    # an ordinary send; clones leave first

The lead is the last peer that is not suspected in the order own rank + 1, + 2, ...; copies leave in that order, and the
lead's, which is the burst itself, leaves last. What the socket sends to anybody else is left alone. Clones belong to no
socket: nothing holds the sender back for them, so it has to pace itself (``xdp_programs/fanout.bpf.c``).

All peers receive at one UDP port, which is fixed when the program is loaded. A copy leaves for the Ethernet address of
the newest packet for its peer alone (one of Tailbound's, which names the peer as its owner). Before there was one, it
is refused and counted.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import AttachError, CapabilityError
from tailbound.forks import keep_from_children
from tailbound.kernel import load, maps, net, pin, syscalls
from tailbound.kernel.maps import Maps, Shape
from tailbound.wire.address import is_ipv6, words_of
from tailbound.wire.packets import DTYPES, layout
from tailbound.wire.schema import FANOUT_MAPS, MAX_RANKS


class Counts(NamedTuple):
    """What left for one rank."""

    leads: int  #: bursts addressed to it that were cloned for the others
    clones: int  #: copies that the device took
    failed: int  #: copies that it did not take
    packets: int  #: packets in ``clones``
    packets_failed: int  #: packets in ``failed``


def shapes() -> dict[str, Shape]:
    """Dtype and shape of the program's maps on this machine."""
    return {m.name: layout(m, cpus=maps.possible_cpus()) for m in FANOUT_MAPS}


def attach_tcx(program: int, interface: str) -> int:
    """Puts a program (a descriptor) at tc egress of ``interface``, where it replaces nobody; the link's descriptor.

    Raises:
        ConfigError: no such interface.
        CapabilityError: no privilege, or a kernel without TCX.
    """
    index = net.index_of(interface)
    try:
        return syscalls.link_create(program, index, 0, syscalls.ATTACH_TCX_EGRESS)
    except OSError as error:
        hint = {
            errno.EPERM: "it needs CAP_NET_ADMIN and CAP_BPF",
            errno.EINVAL: "this kernel has no TCX (Linux 6.6)",
        }.get(error.errno or 0, error.strerror)
        raise CapabilityError(
            f"cannot attach to tc egress of {interface} (errno {error.errno}: {hint}); training works without: "
            "results go to each peer separately, which takes more processor time"
        ) from error


class Fanout:
    """The program on one interface, for one socket. Nothing is cloned before ``live``.

    Not thread-safe: the thread that sends calls ``set_peers`` and ``live``.
    """

    def __init__(
        self,
        made: Maps,
        interface: str,
        port: int,
        program: int = -1,
        link: int = -1,
        *,
        address: str = "",
    ) -> None:
        self.maps = made
        self.program = program
        #: the rank that bursts are to be addressed to; None: no live peer
        self.lead: int | None = None
        self._link = link
        self._settings = made.arrays["fanout"]
        self._settings["active"] = 0
        self._settings["address"], self._settings["prefix"] = words_of(address or net.address_of(interface))
        self._settings["port"] = port
        self._counts = made.arrays["fanout_counts"].view(np.uint64).reshape(-1, MAX_RANKS, len(Counts._fields))
        self._before = self._sums()
        self._own = 0
        self._closed = False
        keep_from_children(self)

    @classmethod
    def attach(
        cls,
        interface: str,
        port: int,
        to: int,
        loader: str = "auto",
        *,
        address: str = "",
    ) -> Fanout:
        """Loads and attaches the program; it goes with this process.

        Args:
            port: UDP source port of the socket that bursts leave, which is bound by now, and until this object is
                closed: that shows others that the job lives. No other traffic may use it.
            to: UDP port at which all peers receive.
            loader: ``auto``, ``object``, ``bcc`` or ``clang``.
            address: of the interface, which the sockets are bound to; empty: its first of IPv4.

        Raises:
            ConfigError: no such interface, or it has no address.
            CapabilityError: compiler, privilege or kernel feature missing: every peer gets a send of its own.
        """
        address = address or net.address_of(interface)
        made, program, link = _attach(interface, to, loader, ipv6=is_ipv6(address))
        try:
            return cls(made, interface, port, program, link, address=address)
        except BaseException:
            made.close(link, program)
            raise

    @classmethod
    def pin(cls, interface: str, to: int, loader: str = "auto", group: int = 0, *, ipv6: bool = False) -> None:
        """Attaches for good, beside what is pinned for ``interface``, for processes of ``group`` to ``open``.

        Args: as for ``attach``.

        Raises:
            ConfigError: no such interface.
            CapabilityError: compiler, privilege or kernel feature missing.
        """
        made, program, link = _attach(interface, to, loader, ipv6=ipv6)
        try:
            pin.add(interface, load.FANOUT, made.fds, link, group)
        finally:
            made.close(link, program)

    @classmethod
    def open(cls, interface: str, port: int, *, address: str = "") -> Fanout:
        """Takes over the program that ``tailbound attach`` has pinned; needs no privilege but the files' group.

        Args: as for ``attach``.

        Raises:
            AttachError: none is pinned.
            CapabilityError: the pins may not be opened.
        """
        made = Maps(pin.open_pins(interface, load.FANOUT_MAP_NAMES))
        try:
            for map_ in FANOUT_MAPS:
                made.map_array(map_, shapes()[map_.name])
            return cls(made, interface, port, address=address)
        except BaseException:
            made.close()
            raise

    @classmethod
    def stop(cls, interface: str) -> None:
        """Ends the cloning of a job that was killed, where the program is pinned and may be opened."""
        with contextlib.suppress(AttachError, CapabilityError), contextlib.closing(cls.open(interface, 0)):
            pass

    def descriptors(self) -> list[int]:
        """See ``forks.Owner``."""
        if self._closed:
            return []
        return [fd for fd in (*self.maps.fds.values(), self.program, self._link) if fd >= 0]

    def set_peers(self, own: int, peers: Mapping[int, str]) -> None:
        """Says at which IP addresses ranks are; cloning stops until ``live`` is called again."""
        table = np.zeros(MAX_RANKS, DTYPES["tb_fanout_peer"])
        for rank, address in peers.items():
            table[rank]["address"], table[rank]["prefix"] = words_of(address)
        self._settings["active"] = 0
        self.maps.arrays["fanout_peers"][:] = table
        self._own, self.lead = own, None

    def live(self, ranks: Iterable[int], suspects: Collection[int] = ()) -> None:
        """The peers that get what is sent from now on. Own rank may be among them; without peers nothing is cloned.

        Args:
            ranks: all of them; ``set_peers`` has named them.
            suspects: those that do not lead, as long as there are others. A burst whose host nobody answers for any
                more waits in front of the program, and no copy leaves.
        """
        own = self._own
        order = sorted(set(ranks) - {own}, key=lambda rank: (rank < own, rank))  # own + 1, ..., 0, ..., own - 1
        settings = self._settings[0]
        settings["active"] = 0
        self.lead = next((rank for rank in reversed(order) if rank not in suspects), order[-1] if order else None)
        if self.lead is None:
            return
        copies = [rank for rank in order if rank != self.lead]
        settings["lead"] = self.lead
        settings["order"][: len(copies)] = copies
        settings["copies"] = len(copies)
        settings["active"] = 1

    def counts(self) -> dict[int, Counts]:
        """By rank, for every rank that has been sent to since this object was made."""
        counts = self._sums() - self._before
        return {int(rank): Counts(*(int(n) for n in counts[rank])) for rank in np.flatnonzero(counts.any(1))}

    def _sums(self) -> NDArray[np.uint64]:
        """u64[MAX_RANKS, counters], over all CPUs."""
        out: NDArray[np.uint64] = self._counts.sum(0)
        return out

    def close(self) -> None:
        """Stops cloning, and detaches unless the program is pinned; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self.lead = None
        self._settings["active"] = 0
        del self._settings
        self.maps.close(self._link, self.program)


def _attach(interface: str, to: int, loader: str, *, ipv6: bool) -> tuple[Maps, int, int]:
    made = maps.create(FANOUT_MAPS, shapes(), events=False)
    program = -1
    try:
        defines = {"TB_PORT": to} | load.of_family(ipv6=ipv6)
        program = load.load("fanout.bpf.c", load.FANOUT, defines, load.FANOUT_MAP_NAMES, made.fds, loader, "tc")
        return made, program, attach_tcx(program, interface)
    except BaseException:
        made.close(program)
        raise
