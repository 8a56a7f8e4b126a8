"""Which interface leads to the other ranks: its address, MTU and speed."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import NamedTuple

from pyroute2 import IPRoute

from tailbound.errors import ConfigError
from tailbound.kernel import ethtool, interfaces
from tailbound.wire.address import family_of, is_ipv6, is_loopback


class Interface(NamedTuple):
    """An interface of this host: IP address in text, MTU in bytes."""

    name: str
    address: str
    mtu: int


def interface(name: str, towards: str = "", *, ipv6: bool | None = None) -> Interface:
    """Looks an interface up.

    Args:
        name: its name.
        towards: name or address of a rank's host; empty: ``MASTER_ADDR``. Of an interface with several addresses it
            says which one is meant: the one that leads there, or the first; of IPv6 only if the host has no other.
        ipv6: the family that the address has to be of; None: as above.

    Raises:
        ConfigError: it is not there, down, or has no address.
    """
    with IPRoute() as route:
        found = route.link_lookup(ifname=name)
        if not found:
            known = ", ".join(sorted(link.get_attr("IFLA_IFNAME") for link in route.get_links()))
            raise ConfigError(f"there is no interface {name!r} here: choose one of {known}")
        (link,) = route.get_links(found[0])
        if link["state"] != "up":
            raise ConfigError(f"interface {name} is down: bring it up (ip link set {name} up)")
        mtu = int(link.get_attr("IFLA_MTU"))
    host = towards or os.environ.get("MASTER_ADDR", "")
    if ipv6 is None:
        families = interfaces.families_of(name)
        ipv6 = families == {True} or (True in families and _over_ipv6(host))
    address = interfaces.address_of(name, ipv6=ipv6)
    leads = _with_address(_source(host)) if host else None
    if leads is not None and leads.name == name and is_ipv6(leads.address) == ipv6:
        address = leads.address
    return Interface(name, address, mtu)


def interface_towards(host: str = "") -> Interface | None:
    """The interface whose address this host uses towards ``host``; None where the way does not leave this host.

    Args:
        host: name or IP address of a rank's host; empty: ``MASTER_ADDR``. On that very host the kernel names the
            address that the others use.

    Raises:
        ConfigError: the way leads over a link-local address of IPv6.
    """
    address = _source(host or os.environ.get("MASTER_ADDR", "127.0.0.1"))
    if is_loopback(address) and _several_hosts():
        # a host's own name often stands for a loopback address in its /etc/hosts
        address = _elsewhere()
    if is_loopback(address):
        return None
    if address.startswith("fe80:"):
        raise ConfigError(
            f"the way to {host or os.environ.get('MASTER_ADDR')} leads over the link-local address {address}, which "
            "means something else on every link: give MASTER_ADDR a global or unique local (fd00::/8) address"
        )
    return _with_address(address)


#: Stand for any host beyond the default route (RFC 5737, RFC 3849: nobody has them). Nothing is sent there.
ELSEWHERE, ELSEWHERE_IPV6 = "192.0.2.1", "2001:db8::1"


def _elsewhere() -> str:
    address = _source(ELSEWHERE)
    return _source(ELSEWHERE_IPV6) if is_loopback(address) else address


def resolves(host: str) -> bool:
    """Whether ``host`` is an IP address or a name that has one."""
    return bool(_addresses(host))


def _addresses(host: str) -> list[str]:
    """Addresses of ``host``, those of IPv4 first; one in brackets, as in a URL, is taken without them."""
    host = host.removeprefix("[").removesuffix("]")
    try:
        found = dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM))
    except (OSError, UnicodeError):
        return []
    return sorted(found, key=is_ipv6)


def _over_ipv6(host: str) -> bool:
    """Whether ``host`` has addresses of IPv6 alone."""
    found = _addresses(host) if host else []
    return bool(found) and is_ipv6(found[0])


def _source(host: str) -> str:
    """The address that this host would send to ``host`` from, by its routes; loopback where it has none."""
    for address in _addresses(host):
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _several_hosts() -> bool:
    """Whether torchrun says that not all ranks are on this host."""
    here, all_ranks = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return here.isdigit() and all_ranks.isdigit() and int(here) < int(all_ranks)


def _with_address(address: str) -> Interface | None:
    """The interface that has ``address``."""
    with IPRoute() as route:
        for found in route.get_addr(family=family_of(address)):
            if address in (found.get_attr("IFA_LOCAL"), found.get_attr("IFA_ADDRESS")):
                (link,) = route.get_links(found["index"])
                return Interface(str(link.get_attr("IFLA_IFNAME")), address, int(link.get_attr("IFLA_MTU")))
    return None


def name_of(address: str) -> str:
    """Name of the interface that has ``address``; empty where none has."""
    found = _with_address(address)
    return "" if found is None else found.name


def speed_of(address: str) -> float:
    """Bytes per second of the link of the interface that has ``address``; 0.0 where nothing says it, as on loopback."""
    found = _with_address(address)
    return 0.0 if found is None else ethtool.speed(found.name) * 1e6 / 8
