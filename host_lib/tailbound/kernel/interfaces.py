"""What the kernel knows of a network interface: index, address, driver, and the XDP program on it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tailbound.errors import AttachError, ConfigError
from tailbound.kernel import ethtool
from tailbound.kernel.rtnetlink import attributes
from tailbound.wire.address import family_of

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFMTU, _SIOCGIFHWADDR, _IFF_LOOPBACK = 0x8913, 0x8915, 0x8921, 0x8927, 8
_RTM_NEWLINK, _RTM_GETLINK, _NLM_F_REQUEST, _NLMSG_ERROR = 16, 18, 1, 2
_IFLA_XDP, _IFLA_XDP_ATTACHED, _IFLA_XDP_PROG_ID = 43, 2, 4
_IFLA_LINK, _IFLA_LINKINFO, _IFLA_LINK_NETNSID, _IFLA_INFO_KIND, _IFLA_INFO_DATA = 5, 18, 37, 1, 2
#: Scopes of IPv6 addresses in ``if_inet6``: global (unique local ones, too), and loopback's.
_REACHED = ("00", "10")
#: IFA_F_TEMPORARY, DADFAILED, DEPRECATED and TENTATIVE (<linux/if_addr.h>).
_PASSING = 0x01 | 0x08 | 0x20 | 0x40
_IFLA_VLAN_ID, _IFLA_VLAN_PROTOCOL, _ETH_P_8021Q = 1, 5, 0x8100
_MODES = {1: "native", 2: "generic", 3: "offloaded", 4: "several"}


def index_of(interface: str) -> int:
    """Interface index.

    Raises:
        ConfigError: no such interface in this network namespace.
    """
    try:
        return socket.if_nametoindex(interface)
    except OSError as error:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(f"no interface {interface!r} in this network namespace; there are: {names}") from error


def _ioctl(interface: str, request: int) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        return fcntl.ioctl(s, request, interface.encode()[:15].ljust(40, b"\0"))


def _attributes_of(interface: str) -> dict[int, bytes]:
    """Attributes of a link, by rtnetlink; needs no privilege."""
    index = index_of(interface)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as s:
        message = struct.pack("=BxHiII", 0, 0, index, 0, 0)
        s.send(struct.pack("=IHHII", 16 + len(message), _RTM_GETLINK, _NLM_F_REQUEST, 1, 0) + message)
        reply = s.recv(1 << 17)
    kind = struct.unpack_from("=H", reply, 4)[0]
    if kind == _NLMSG_ERROR:
        code = -struct.unpack_from("=i", reply, 16)[0]
        raise OSError(code, os.strerror(code))
    if kind != _RTM_NEWLINK:
        raise OSError(errno.EPROTO, f"rtnetlink answered with message {kind}")
    return attributes(reply[32:])


class Device(NamedTuple):
    """What carries the frames of an interface, and where XDP programs are: itself, or the device below a VLAN's."""

    name: str
    vlan: int  #: of the tags that frames have there; 0: none


def device_of(interface: str) -> Device:
    """The device that carries an interface's frames.

    Raises:
        ConfigError: no such interface.
        AttachError: one of a VLAN whose device is in another network namespace, or whose tags are not those of IEEE
            802.1Q alone.
    """
    found = _attributes_of(interface)
    info = attributes(found.get(_IFLA_LINKINFO, b""))
    if info.get(_IFLA_INFO_KIND, b"").rstrip(b"\0") != b"vlan":
        return Device(interface, 0)
    data = attributes(info.get(_IFLA_INFO_DATA, b""))
    (vlan,) = struct.unpack_from("=H", data[_IFLA_VLAN_ID])
    (protocol,) = struct.unpack_from("!H", data[_IFLA_VLAN_PROTOCOL])
    if _IFLA_LINK_NETNSID in found:
        raise AttachError(
            f"the device below {interface}, an interface of VLAN {vlan}, is in another network namespace, where alone "
            "a program can be attached: use the udp datapath"
        )
    below = socket.if_indextoname(struct.unpack_from("=I", found[_IFLA_LINK])[0])
    if protocol != _ETH_P_8021Q or device_of(below).vlan:
        raise AttachError(
            f"packets of {interface} have tags in tags, or service tags, which the program does not take off: use the "
            "udp datapath"
        )
    return Device(below, vlan)


def address_of(interface: str, *, ipv6: bool = False) -> str:
    """First IPv4 address; or first IPv6 address that other hosts reach without naming an interface.

    Raises:
        ConfigError: no such interface, or it has none.
    """
    index_of(interface)
    found = _ipv6_of(interface) if ipv6 else _ipv4_of(interface)
    if found:
        return found[0]
    if ipv6:
        raise ConfigError(
            f"interface {interface} has no global or unique local IPv6 address (link-local ones, and ones that are "
            f"still tentative, will not do): give it one, `ip address add fd00::1/64 dev {interface}` say"
        )
    more = ", and of IPv6 a link-local one at most" if not _ipv6_of(interface) else ""
    raise ConfigError(f"interface {interface} has no IPv4 address{more}: give it one")


def families_of(interface: str) -> set[bool]:
    """Of which families ``interface`` has an address for ``address_of``: False for IPv4, True for IPv6.

    Raises:
        ConfigError: no such interface.
    """
    index_of(interface)
    return {ipv6 for ipv6, found in ((False, _ipv4_of(interface)), (True, _ipv6_of(interface))) if found}


def _ipv4_of(interface: str) -> list[str]:
    try:
        return [socket.inet_ntoa(_ioctl(interface, _SIOCGIFADDR)[20:24])]
    except OSError:
        return []


def _ipv6_of(interface: str) -> list[str]:
    """Global and unique local addresses; neither those that will change soon nor those that are still being tried."""
    try:
        lines = Path("/proc/thread-self/net/if_inet6").read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return []
    found = []
    for line in lines:  # address, index, length of prefix, scope, flags, name
        address, _, _, scope, flags, name = line.split()
        if name == interface and scope in _REACHED and not int(flags, 16) & _PASSING:
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    return found


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
    index_of(interface)
    return int(struct.unpack_from("=i", _ioctl(interface, _SIOCGIFMTU), 16)[0])


def mac_of(interface: str) -> bytes:
    """Ethernet address, 6 bytes.

    Raises:
        ConfigError: no such interface.
    """
    index_of(interface)
    return _ioctl(interface, _SIOCGIFHWADDR)[18:24]


def driver_of(interface: str) -> str:
    """Name of the driver of a device; ``loopback`` for lo, empty where none is known."""
    index_of(interface)
    if struct.unpack_from("=H", _ioctl(interface, _SIOCGIFFLAGS), 16)[0] & _IFF_LOOPBACK:
        return "loopback"
    try:
        return ethtool.driver(interface)
    except OSError:
        return ""


def of_pci(identity: str, network: Path = Path("/sys/class/net")) -> list[str]:
    """Names of the interfaces of a kind of PCI device, sorted.

    Args:
        identity: vendor and device in hexadecimal, as ``lspci -n`` shows them: ``15b3:101d``.
        network: where the kernel lists interfaces; of this network namespace.

    Raises:
        ConfigError: not of that form, or there is none.
    """
    wanted = re.fullmatch(r"([0-9a-fA-F]{4}):([0-9a-fA-F]{4})", identity)
    if wanted is None:
        raise ConfigError(f"{identity!r} is no PCI device: give vendor:device as `lspci -n` shows them, 15b3:101d say")
    found = {path.name: tuple(_hexadecimal(path / "device" / file) for file in ("vendor", "device"))
             for path in network.glob("*")}  # fmt: skip
    names = sorted(name for name, ids in found.items() if ids == tuple(int(part, 16) for part in wanted.groups()))
    if not names:
        there = ", ".join(f"{name} {ids[0]:04x}:{ids[1]:04x}" for name, ids in sorted(found.items()) if any(ids))
        raise ConfigError(
            f"no interface here is of a PCI device {identity}; there are: {there or 'none of PCI at all'}"
        )
    return names


def _hexadecimal(path: Path) -> int:
    """0 where there is no such file, as for an interface that is no PCI device's."""
    try:
        return int(path.read_text(), 16)
    except (OSError, ValueError):
        return 0


def private_flags(interface: str) -> dict[str, bool]:
    """The driver's private flags by name; empty where it has none or does not say.

    Raises:
        ConfigError: no such interface.
    """
    index_of(interface)
    try:
        return ethtool.private_flags(interface)
    except OSError:
        return {}


@dataclass(frozen=True)
class Attached:
    """An XDP program on an interface."""

    mode: str  #: native, generic, offloaded or several
    prog_id: int  #: 0 where there are several


def xdp_on(interface: str) -> Attached | None:
    """The XDP program on ``interface``, by rtnetlink; needs no privilege.

    Raises:
        ConfigError: no such interface.
    """
    xdp = attributes(_attributes_of(interface).get(_IFLA_XDP, b""))
    mode = xdp.get(_IFLA_XDP_ATTACHED, b"\0")[0]
    if not mode:
        return None
    prog_id = struct.unpack_from("=I", xdp.get(_IFLA_XDP_PROG_ID, bytes(4)))[0]
    return Attached(_MODES.get(mode, f"mode {mode}"), prog_id)


def xdp_below(interface: str) -> Attached | None:
    """The XDP program on the device of ``interface``; None also where that can have none.

    Raises:
        ConfigError: no such interface.
    """
    try:
        return xdp_on(device_of(interface).name)
    except AttachError:
        return None


def possible_cpus() -> int:
    """Highest possible CPU plus one, the kernel's nr_cpu_ids: rows of counters per CPU."""
    text = Path("/sys/devices/system/cpu/possible").read_text()
    return int(re.split(r"[-,]", text.strip())[-1]) + 1


def numa_node(interface: str) -> int:
    """NUMA node of the device; -1 where the machine has one node only, or the device none."""
    if not Path("/sys/devices/system/node/node1").exists():
        return -1
    try:
        return int(Path("/sys/class/net", interface, "device/numa_node").read_text())
    except (OSError, ValueError):
        return -1
