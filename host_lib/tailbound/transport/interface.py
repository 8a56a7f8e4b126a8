"""Address and MTU of a network interface, over netlink."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from pyroute2 import IPRoute

from tailbound.errors import ConfigError


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
        addresses = [a.get_attr("IFA_ADDRESS") for a in route.get_addr(index=found[0], family=socket.AF_INET)]
        if not addresses:
            raise ConfigError(f"interface {name} has no IPv4 address: give it one, Tailbound's packets are IPv4")
        return Interface(name, addresses[0], int(link.get_attr("IFLA_MTU")))


def default_address() -> str:
    """The address this host uses towards MASTER_ADDR, else loopback."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def mtu_of(address: str) -> int | None:
    """MTU in bytes of the interface that has ``address``; None where none has, and for loopback, which takes all."""
    if address.startswith("127."):
        return None
    with IPRoute() as route:
        for found in route.get_addr(family=socket.AF_INET):
            if found.get_attr("IFA_ADDRESS") == address:
                (link,) = route.get_links(found["index"])
                return int(link.get_attr("IFLA_MTU"))
    return None
