"""Which interface leads to the other ranks: its address, MTU and speed."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from pyroute2 import IPRoute

from tailbound.errors import ConfigError
from tailbound.kernel import ethtool


class Interface(NamedTuple):
    """An interface of this host: IPv4 address in dotted form, MTU in bytes."""

    name: str
    address: str
    mtu: int


def interface(name: str) -> Interface:
    """Looks an interface up.

    Raises:
        ConfigError: it is not there, down, or has no IPv4 address.
    """
    with IPRoute() as route:
        found = route.link_lookup(ifname=name)
        if not found:
            known = ", ".join(sorted(link.get_attr("IFLA_IFNAME") for link in route.get_links()))
            raise ConfigError(f"there is no interface {name!r} here: choose one of {known}")
        (link,) = route.get_links(found[0])
        if link["state"] != "up":
            raise ConfigError(f"interface {name} is down: bring it up (ip link set {name} up)")
        addresses = [a.get_attr("IFA_LOCAL") for a in route.get_addr(index=found[0], family=socket.AF_INET)]
        if not addresses:
            raise ConfigError(f"interface {name} has no IPv4 address: give it one, Tailbound's packets are IPv4")
        return Interface(name, addresses[0], int(link.get_attr("IFLA_MTU")))


def interface_towards(host: str = "") -> Interface | None:
    """The interface whose address this host uses towards ``host``; None where the way does not leave this host.

    Args:
        host: name or IPv4 address of a rank's host; empty: ``MASTER_ADDR``. On that very host the kernel names the
            address that the others use.
    """
    address = _source(host or os.environ.get("MASTER_ADDR", "127.0.0.1"))
    if address.startswith("127.") and _several_hosts():
        # a host's own name often stands for a loopback address in its /etc/hosts
        address = _source(ELSEWHERE)
    if address.startswith("127."):
        return None
    with IPRoute() as route:
        for found in route.get_addr(family=socket.AF_INET):
            if found.get_attr("IFA_LOCAL") == address:
                (link,) = route.get_links(found["index"])
                return Interface(link.get_attr("IFLA_IFNAME"), address, int(link.get_attr("IFLA_MTU")))
    return None


#: Stands for any host beyond the default route (RFC 5737: nobody has it). Nothing is sent there.
ELSEWHERE = "192.0.2.1"


def resolves(host: str) -> bool:
    """Whether ``host`` is an IPv4 address or a name that has one."""
    try:
        socket.getaddrinfo(host, None, socket.AF_INET)
    except OSError:
        return False
    return True


def _source(host: str) -> str:
    """The address that this host would send to ``host`` from, by its routes; loopback where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _several_hosts() -> bool:
    """Whether torchrun says that not all ranks are on this host."""
    here, all_ranks = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return here.isdigit() and all_ranks.isdigit() and int(here) < int(all_ranks)


def speed_of(address: str) -> float:
    """Bytes per second of the link of the interface that has ``address``; 0.0 where nothing says it, as on loopback."""
    with IPRoute() as route:
        for found in route.get_addr(family=socket.AF_INET):
            if found.get_attr("IFA_ADDRESS") == address:
                (link,) = route.get_links(found["index"])
                return ethtool.speed(str(link.get_attr("IFLA_IFNAME"))) * 1e6 / 8
    return 0.0
