"""The shape of a lab: names, addresses, MACs. Pure; ``build`` makes it real, and docs/lab.md draws it.

Where neither rate nor faults are asked for there is no cable and the worker's veth ends at the switch. 198.18.0.0/15 is
kept for benchmarks (RFC 2544, RFC 6890), and no namespace of a lab has a link or a route to anything else.
"""

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass

from tailbound.wire.address import is_ipv6

#: Of the data link of a lab with IPv6: unique local addresses (RFC 4193).
IPV6_NETWORK = ipaddress.IPv6Network("fd7b::/64")


class Link(enum.Enum):
    """The two networks every worker is on."""

    DATA = "data"
    PLAIN = "plain"

    @property
    def network(self) -> ipaddress.IPv4Network:
        """Its addresses."""
        return ipaddress.IPv4Network("198.18.0.0/16" if self is Link.DATA else "198.19.0.0/16")

    @property
    def interface(self) -> str:
        """Name of its interface in a worker."""
        return f"{self.value}0"

    def address(self, rank: int, *, ipv6: bool = False) -> str:
        """Address of ``rank``: network + 1 + rank; the plain link has those of IPv4 alone."""
        network = IPV6_NETWORK if ipv6 and self is Link.DATA else self.network
        return str(network.network_address + 1 + rank)

    def mac(self, rank: int) -> str:
        """MAC of ``rank``'s end: locally administered, unicast."""
        return f"02:7b:{0 if self is Link.DATA else 1:02x}:00:{rank >> 8:02x}:{rank & 255:02x}"

    @property
    def worker_port(self) -> str:
        """Name of the cable's end towards the worker."""
        return f"{self.value}-worker"

    @property
    def switch_port(self) -> str:
        """Name of the cable's end towards the switch."""
        return f"{self.value}-switch"

    @property
    def bridge(self) -> str:
        """Name of its bridge in cable and switch."""
        return self.value

    @property
    def background_port(self) -> str:
        """Name of the switch's port towards the namespace that the background comes from."""
        return f"{self.value}-bg"

    @property
    def background_address(self) -> str:
        """IPv4 address of the background's source."""
        return str(self.network.network_address + (253 << 8) + 1)

    @property
    def background_mac(self) -> str:
        """MAC of the background's source."""
        return f"02:7b:{0 if self is Link.DATA else 1:02x}:01:00:00"

    def switch_address(self, *, ipv6: bool = False) -> str:
        """Address of the switch, where it sums; the plain link has those of IPv4 alone."""
        return self.address(252 << 8, ipv6=ipv6)

    @property
    def switch_mac(self) -> str:
        """MAC of the switch, where it sums."""
        return f"02:7b:{0 if self is Link.DATA else 1:02x}:02:00:00"

    def nobody(self, rank: int) -> str:
        """IPv4 address nobody has: packets to it and to the MAC of ``rank`` reach the worker, and its stack drops them
        without a word."""
        return str(self.network.network_address + (254 << 8) + rank)

    def port(self, rank: int) -> str:
        """Name of ``rank``'s port at the switch."""
        return f"{self.value}{rank}"


LINKS = (Link.DATA, Link.PLAIN)


@dataclass(frozen=True)
class Worker:
    """One worker: its namespace, and its addresses on both links."""

    rank: int
    namespace: str
    address: str
    plain_address: str

    @property
    def interface(self) -> str:
        """On the data link."""
        return Link.DATA.interface

    @property
    def mac(self) -> str:
        """On the data link."""
        return Link.DATA.mac(self.rank)

    def address_on(self, link: Link) -> str:
        """IP address on ``link``."""
        return self.address if link is Link.DATA else self.plain_address


@dataclass(frozen=True)
class Topology:
    """All of a lab's namespaces.

    Attributes:
        workers: by rank.
        cables: by rank, the namespace between a worker and the switch; empty where they are joined directly.
        switch: the switch's.
        background: that of foreign traffic.
    """

    workers: tuple[Worker, ...]
    cables: tuple[str, ...]
    switch: str
    background: str | None = None

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Every namespace, in the order of creation."""
        more = () if self.background is None else (self.background,)
        return (self.switch, *self.cables, *(w.namespace for w in self.workers), *more)

    @property
    def hosts(self) -> str:
        """Lines for ``/etc/hosts``: ``workerR`` on the plain link, ``workerR-data`` on the data link.

        Mapped addresses too: a server that listens on an IPv6 socket asks for those.
        """
        return "\n".join(
            line for w in self.workers
            for address, name in ((w.plain_address, f"worker{w.rank}"), (w.address, f"worker{w.rank}-data"))
            for line in (f"{address} {name}", *(() if is_ipv6(address) else (f"::ffff:{address} {name}",)))
        )  # fmt: skip

    def cable_ends(self, rank: int, link: Link) -> list[tuple[str, str]]:
        """(namespace, interface) of both ends of a cable: towards the worker, towards the switch."""
        return [(self.cables[rank], port) for port in (link.worker_port, link.switch_port)]


def describe(prefix: str, workers: int, *, cables: bool, background: bool = False, ipv6: bool = False) -> Topology:
    """The topology of a lab of 1..256 workers whose namespaces begin with ``prefix``, which no other lab here has."""
    return Topology(
        workers=tuple(
            Worker(rank, f"{prefix}-w{rank}", Link.DATA.address(rank, ipv6=ipv6), Link.PLAIN.address(rank))
            for rank in range(workers)
        ),
        cables=tuple(f"{prefix}-c{rank}" for rank in range(workers)) if cables else (),
        switch=f"{prefix}-s",
        background=f"{prefix}-b" if background else None,
    )
