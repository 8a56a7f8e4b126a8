"""Network interfaces, addresses and routes of the calling thread's network namespace, as rtnetlink tells them.

Each request opens a socket of its own (1 to 2 ms): pyroute2 ties one to the thread that made it. The codec's worker
threads and the laboratory's namespaces ask from threads of their own.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from tailbound.errors import AttachError, ConfigError
from tailbound.kernel import ethtool
from tailbound.wire.address import family_of, is_ipv6, is_loopback

_IFF_LOOPBACK, _ETH_P_8021Q = 8, 0x8100
#: Scopes of IPv6 addresses that other hosts reach (global and unique local), and of loopback's.
_REACHED = (0, 254)
#: IFA_F_TEMPORARY, DADFAILED, DEPRECATED and TENTATIVE (<linux/if_addr.h>).
_PASSING = 0x01 | 0x08 | 0x20 | 0x40
_MODES = {"xdp": "native", "xdpgeneric": "generic", "xdpoffload": "offloaded", "xdpmulti": "several"}
#: Stand for any host beyond the default route (RFC 5737, RFC 3849: nobody has them). Nothing is sent there.
ELSEWHERE, ELSEWHERE_IPV6 = "192.0.2.1", "2001:db8::1"


@contextlib.contextmanager
def netlink(sock: socket.socket | None = None) -> Iterator[IPRoute]:
    """Requests to rtnetlink.

    Args:
        sock: carries them and stays open. It stays with the namespace that it was made in, whichever thread asks.

    Raises:
        OSError: the kernel refused a request.
    """
    try:
        with IPRoute(use_socket=None if sock is None else sock.dup()) as route:
            yield route
    except NetlinkError as error:
        raise OSError(error.code, os.strerror(error.code)) from error


def index_of(interface: str) -> int:
    """Interface index.

    Raises:
        ConfigError: no such interface in this network namespace.
    """
    try:
        return socket.if_nametoindex(interface)
    except OSError as error:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(f"no interface {interface!r} in this network namespace; choose one of: {names}") from error


def link_of(interface: str) -> Any:
    """The kernel's message (``ifinfmsg``) about an interface; needs no privilege.

    Raises:
        ConfigError: no such interface.
    """
    index = index_of(interface)
    with netlink() as route:
        return route.link("get", index=index)[0]


class Device(NamedTuple):
    """What carries the frames of an interface, and where XDP programs are: itself, or the device below a VLAN's."""

    name: str
    vlan: int  #: of the tags that frames have there; 0: none


def device_of(interface: str) -> Device:
    """The device that carries an interface's frames.

    Raises:
        ConfigError: no such interface.
        AttachError: a VLAN's device is in another network namespace, or its tags are not those of IEEE 802.1Q alone.
    """
    link = link_of(interface)
    if link.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") != "vlan":
        return Device(interface, 0)
    data = link.get_nested("IFLA_LINKINFO", "IFLA_INFO_DATA")
    vlan, protocol = int(data.get_attr("IFLA_VLAN_ID")), data.get_attr("IFLA_VLAN_PROTOCOL")
    if link.get_attr("IFLA_LINK_NETNSID") is not None:
        raise AttachError(
            f"the device below {interface}, an interface of VLAN {vlan}, is in another network namespace, where alone "
            "a program can be attached: use the udp datapath"
        )
    below = socket.if_indextoname(link.get_attr("IFLA_LINK"))
    if protocol != _ETH_P_8021Q or device_of(below).vlan:
        raise AttachError(
            f"packets of {interface} have tags in tags, or service tags, which the program does not take off: use the "
            "udp datapath"
        )
    return Device(below, vlan)


def _addresses_on(interface: str, *, ipv6: bool) -> list[str]:
    """Addresses of a family that other hosts reach; of IPv6 those that are neither temporary nor tentative."""
    index = index_of(interface)
    with netlink() as route:
        found = route.get_addr(family=socket.AF_INET6 if ipv6 else socket.AF_INET, index=index)
    return [
        str(each.get_attr("IFA_LOCAL") or each.get_attr("IFA_ADDRESS"))
        for each in found
        if not ipv6 or (each["scope"] in _REACHED and not each.get_attr("IFA_FLAGS", each["flags"]) & _PASSING)
    ]


def address_of(interface: str, *, ipv6: bool = False) -> str:
    """First IPv4 address; or first IPv6 address that other hosts reach without naming an interface.

    Raises:
        ConfigError: no such interface, or it has none.
    """
    if found := _addresses_on(interface, ipv6=ipv6):
        return found[0]
    if ipv6:
        raise ConfigError(
            f"interface {interface} has no global or unique local IPv6 address (link-local ones, and ones that are "
            f"still tentative, will not do): give it one, `ip address add fd00::1/64 dev {interface}` say"
        )
    more = ", and of IPv6 a link-local one at most" if not _addresses_on(interface, ipv6=True) else ""
    raise ConfigError(f"interface {interface} has no IPv4 address{more}: give it one")


def families_of(interface: str) -> set[bool]:
    """Of which families ``interface`` has an address for ``address_of``: False for IPv4, True for IPv6.

    Raises:
        ConfigError: no such interface.
    """
    return {ipv6 for ipv6 in (False, True) if _addresses_on(interface, ipv6=ipv6)}


def is_taken(address: str, port: int) -> bool:
    """Whether a socket is bound to a UDP port of an address of this host, or the address is not its own."""
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((address, port))
        except (OSError, OverflowError):
            return True
    return False


def mtu_of(interface: str) -> int:
    """MTU in bytes.

    Raises:
        ConfigError: no such interface.
    """
    return int(link_of(interface).get_attr("IFLA_MTU"))


def mac_of(interface: str) -> bytes:
    """Ethernet address, 6 bytes.

    Raises:
        ConfigError: no such interface.
    """
    return bytes.fromhex(link_of(interface).get_attr("IFLA_ADDRESS").replace(":", ""))


def driver_of(interface: str) -> str:
    """Name of the driver of a device; ``loopback`` for lo, empty where none is known.

    Raises:
        ConfigError: no such interface.
    """
    if link_of(interface)["flags"] & _IFF_LOOPBACK:
        return "loopback"
    try:
        return ethtool.driver(interface)
    except OSError:
        return ""


def numa_node(interface: str) -> int:
    """NUMA node of the device; -1 where the machine has one node only, or the device none."""
    if not Path("/sys/devices/system/node/node1").exists():
        return -1
    return _number(Path("/sys/class/net", interface, "device/numa_node"))


def _number(path: Path) -> int:
    """-1 where there is no such file, as for an interface without a device."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


class Attached(NamedTuple):
    """An XDP program on an interface."""

    mode: str  #: native, generic, offloaded or several
    prog_id: int  #: 0 where there are several


def xdp_on(interface: str) -> Attached | None:
    """The XDP program on ``interface``; needs no privilege.

    Raises:
        ConfigError: no such interface.
    """
    link = link_of(interface)
    mode = link.get_nested("IFLA_XDP", "IFLA_XDP_ATTACHED")
    return Attached(_MODES[mode], int(link.get_nested("IFLA_XDP", "IFLA_XDP_PROG_ID") or 0)) if mode else None


def xdp_below(interface: str) -> Attached | None:
    """The XDP program on the device of ``interface``; None also where that can have none.

    Raises:
        ConfigError: no such interface.
    """
    try:
        return xdp_on(device_of(interface).name)
    except AttachError:
        return None


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
    link = link_of(name)
    if link["state"] != "up":
        raise ConfigError(f"interface {name} is down: bring it up (ip link set {name} up)")
    host = towards or os.environ.get("MASTER_ADDR", "")
    if ipv6 is None:
        families = families_of(name)
        ipv6 = families == {True} or (True in families and _over_ipv6(host))
    address = address_of(name, ipv6=ipv6)
    leads = _with_address(_source(host)) if host else None
    if leads is not None and leads.name == name and is_ipv6(leads.address) == ipv6:
        address = leads.address
    return Interface(name, address, int(link.get_attr("IFLA_MTU")))


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
        address = _source(ELSEWHERE)
        address = _source(ELSEWHERE_IPV6) if is_loopback(address) else address
    if is_loopback(address):
        return None
    if address.startswith("fe80:"):
        raise ConfigError(
            f"the way to {host or os.environ.get('MASTER_ADDR')} leads over the link-local address {address}, which "
            "means something else on every link: give MASTER_ADDR a global or unique local (fd00::/8) address"
        )
    return _with_address(address)


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
    with netlink() as route:
        for found in route.get_addr(family=family_of(address)):
            if address in (found.get_attr("IFA_LOCAL"), found.get_attr("IFA_ADDRESS")):
                (link,) = route.link("get", index=found["index"])
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
