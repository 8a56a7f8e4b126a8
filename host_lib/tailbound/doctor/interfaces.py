"""Raw facts about network interfaces: driver, MTU, queues, offloads that matter, and the XDP program that is there."""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailbound.kernel import interfaces as kernel_interfaces

__all__ = ["NATIVE_DRIVERS", "Interface", "default_interface", "interface", "interfaces"]

#: Drivers whose native XDP is in mainline Linux. The kernel's own word (``xdp_features``, Linux 6.3) goes first.
_NATIVE = """
    bnxt_en bond cxgb4 dpaa2-eth ena enetc fec fm10k funeth gve hv_netvsc i40e iavf ice idpf igb igc ionic ixgbe ixgbevf
    lan966x mana mlx4_en mlx5_core mtk_eth_soc mvneta mvpp2 nfp octeontx2 qede sfc stmmac thunder-nicvf ti_cpsw tsnep
    tun veth virtio_net vmxnet3 xen_netfront
"""
NATIVE_DRIVERS = frozenset(_NATIVE.split())
_SIOCETHTOOL = 0x8946
_ETHTOOL_GFLAGS, _ETHTOOL_GRXFH, _ETHTOOL_GCHANNELS = 0x25, 0x29, 0x3C
_ETH_FLAG_LRO = 1 << 15
_UDP_V4_FLOW = 0x02
_XDP_FEATURE_BASIC = 1  # NETDEV_XDP_ACT_BASIC
_RXH_PORTS = 1 << 6 | 1 << 7  # source and destination port


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str
    up: bool
    mtu: int
    driver: str | None
    native_xdp: bool | None  #: None where neither the kernel nor the driver's name tells
    rx_queues: int
    tx_queues: int
    lro: bool | None  #: large receive offload on (it would hide packet borders)
    hashes_udp_ports: bool | None  #: receive-side scaling looks at UDP ports; None where the driver does not say
    xdp_program: int | None  #: id of the XDP program that is attached


def interfaces() -> list[Interface]:
    """All interfaces of this network namespace except loopback, by name."""
    return [interface(name) for _, name in sorted(socket.if_nameindex(), key=lambda pair: pair[1]) if name != "lo"]


def default_interface() -> str | None:
    """Interface of the IPv4 default route, else the first that is up, else None."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/route").read_text().splitlines()[1:]:
            name, destination, _, flags, *_ = line.split()
            if destination == "00000000" and int(flags, 16) & 1:
                return name
    return next((i.name for i in interfaces() if i.up), None)


def interface(name: str) -> Interface:
    """Facts about ``name``.

    Raises:
        ConfigError: there is no such interface here.
    """
    index = kernel_interfaces.index_of(name)
    attributes, flags = _link(index)
    driver = kernel_interfaces.driver_of(name) or None
    xdp = kernel_interfaces.xdp_on(name)
    rx, tx = _queues(name) or (attributes.get("IFLA_NUM_RX_QUEUES", 1), attributes.get("IFLA_NUM_TX_QUEUES", 1))
    return Interface(
        name=name,
        up=bool(flags & 1),
        mtu=int(attributes.get("IFLA_MTU", 0)),
        driver=driver,
        native_xdp=_native(index, driver),
        rx_queues=int(rx),
        tx_queues=int(tx),
        lro=_lro(name),
        hashes_udp_ports=_hashes_udp_ports(name),
        xdp_program=xdp.prog_id if xdp else None,
    )


def _link(index: int) -> tuple[dict[str, Any], int]:
    """Netlink attributes and flags of a link (sysfs may show another namespace's)."""
    from pyroute2 import IPRoute

    with IPRoute() as route:
        message = route.get_links(index)[0]
    return dict(message["attrs"]), int(message["flags"])


def _native(index: int, driver: str | None) -> bool | None:
    features = _xdp_features(index)
    if features is not None:
        return bool(features & _XDP_FEATURE_BASIC)
    return None if driver is None else driver in NATIVE_DRIVERS


def _xdp_features(index: int) -> int | None:
    """``xdp_features`` from the kernel's netdev family, or None before Linux 6.3."""
    from pyroute2.netlink import NLM_F_REQUEST, genlmsg
    from pyroute2.netlink.exceptions import NetlinkError
    from pyroute2.netlink.generic import GenericNetlinkSocket

    class Device(genlmsg):  # type: ignore[misc]
        prefix = "DEV_"
        nla_map = (("DEV_PAD0", "none"), ("DEV_IFINDEX", "uint32"), ("DEV_PAD", "none"), ("DEV_XDP_FEATURES", "uint64"))

    with GenericNetlinkSocket() as generic:
        try:
            generic.bind("netdev", Device)
            request = Device()
            request["cmd"], request["version"] = 1, 1
            request["attrs"] = [("DEV_IFINDEX", index)]
            answer = generic.nlm_request(request, msg_type=generic.prid, msg_flags=NLM_F_REQUEST)[0]
        except (NetlinkError, OSError):
            return None
        found = answer.get_attr("DEV_XDP_FEATURES")
        return None if found is None else int(found)


def _ethtool(name: str, size: int, command: int, *words: int) -> bytes | None:
    """One ethtool request of ``size`` bytes that starts with ``command`` and ``words`` (u32), or None where refused."""
    buffer = array.array("B", struct.pack(f"={1 + len(words)}I", command, *words).ljust(size, b"\0"))
    request = struct.pack("16sP16x", name.encode(), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            fcntl.ioctl(sock, _SIOCETHTOOL, request)
        except OSError:
            return None
    return buffer.tobytes()


def _queues(name: str) -> tuple[int, int] | None:
    """Queues in use for receiving and for sending."""
    answer = _ethtool(name, 36, _ETHTOOL_GCHANNELS)
    if answer is None:
        return None
    rx, tx, _, combined = struct.unpack_from("=4I", answer, 20)
    return rx + combined, tx + combined


def _lro(name: str) -> bool | None:
    answer = _ethtool(name, 8, _ETHTOOL_GFLAGS)
    return bool(struct.unpack_from("=I", answer, 4)[0] & _ETH_FLAG_LRO) if answer else None


def _hashes_udp_ports(name: str) -> bool | None:
    answer = _ethtool(name, 192, _ETHTOOL_GRXFH, _UDP_V4_FLOW)
    return struct.unpack_from("=Q", answer, 8)[0] & _RXH_PORTS == _RXH_PORTS if answer else None
