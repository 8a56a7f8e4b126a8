"""Raw facts about network interfaces: driver, MTU, queues, offloads that matter, and the XDP program that is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pyroute2.netlink import NLM_F_REQUEST, genlmsg
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.generic import GenericNetlinkSocket

from tailbound.errors import AttachError, CapabilityError, ConfigError
from tailbound.kernel import ethtool, net, pin
from tailbound.kernel.attach import program_name
from tailbound.kernel.linear import PAGE, linear_of
from tailbound.kernel.load import WORKER
from tailbound.kernel.net import ELSEWHERE, ELSEWHERE_IPV6, interface_towards
from tailbound.wire.schema import IPV4_BYTES, IPV6_BYTES

T = TypeVar("T")

#: Drivers that have native XDP in Linux 6.2, by the names that ``ethtool -i`` gives. Later kernels say it themselves
#: (``xdp_features``), which goes first.
_NATIVE = """
    atlantic bnxt_en bonding cpsw cpsw-switch ena fec fsl_dpa fsl_dpaa2_eth fsl_enetc fsl_enetc_vf funeth hv_netvsc i40e
    ice igb igc ixgbe ixgbevf lan966x-switch mana mlx4_en mlx5_core mtk_soc_eth mvneta mvpp2 netsec nfp nicvf qede
    rvu_nicpf rvu_nicvf sfc st_gmac st_xgmac tun veth vif virtio_net
"""
NATIVE_DRIVERS = frozenset(_NATIVE.split())
_XDP_FEATURE_BASIC = 1  # NETDEV_XDP_ACT_BASIC
_TELLS = "TAILBOUND_INTERFACE=NAME tells it, or MASTER_ADDR=HOST with the name or address of rank 0's host"


@dataclass(frozen=True)
class Interface:
    """One network interface. Of a VLAN's all but name, state and ``mtu`` is that of the device below."""

    name: str
    device: str  #: carries its frames: itself, but for a VLAN's
    up: bool
    mtu: int
    device_mtu: int  #: what a driver goes by; ``mtu``, but for a VLAN's
    driver: str | None
    native_xdp: bool | None  #: None where neither the kernel nor the driver's name tells
    rx_queues: int
    tx_queues: int
    tx_most: int | None  #: most queues for sending that there can be; None where the driver does not say
    lro: bool | None  #: large receive offload on (it would hide packet borders)
    vlan_stripping: bool | None  #: tags go before the program sees the frame; false for a VLAN's, where that is right
    linear: int  #: bytes of a frame that the driver hands over in one piece (``kernel.linear``); 0: none
    hashes_udp_ports: bool | None  #: receive-side scaling looks at UDP ports, in the job's family; None: not known
    xdp_program: int | None  #: id of the XDP program that is attached
    xdp_name: str | None  #: its name; None where this process may not know
    rx_most: int | None = None  #: most queues for receiving that there can be; None where the driver does not say
    gro_hw: bool | None = None  #: the device joins packets, and says how they were
    gro_hw_fixed: bool = False  #: and it cannot be turned off
    xdp_owner: str | None = None  #: the interface that it was attached for, of those that share the device or did
    ipv6: bool = False  #: it has addresses of IPv6 alone, and so has a job over it

    @property
    def ip_bytes(self) -> int:
        """Of an IP header of a job over it."""
        return IPV6_BYTES if self.ipv6 else IPV4_BYTES


def leads_to_peers(named: str | None = None) -> tuple[str | None, str]:
    """The interface that a job started in this environment would use, and how that is known, in words.

    A job looks up the way to ``MASTER_ADDR``. Outside a job's environment the way to other networks stands for it.

    Args:
        named: an interface that the user has named; None: none.

    Returns:
        The name, None where none can be known, and the reason, which then says what would tell.
    """
    if named:
        return named, "it was named"
    if variable := os.environ.get("TAILBOUND_INTERFACE"):
        return variable, "TAILBOUND_INTERFACE names it"
    if found := interface_towards():
        return found.name, f"it is the way to MASTER_ADDR={os.environ.get('MASTER_ADDR', '')}"
    if found := _elsewhere():
        return found.name, f"it is the way to other networks (a guess, {_TELLS})"
    return None, f"which interface leads to the peers is not known: {_TELLS}"


def _elsewhere() -> net.Interface | None:
    """The interface that leads to other networks, by IPv4 or else by IPv6.

    None, too, where the only way there leads over a link-local address of IPv6: no job can use it.
    """
    try:
        return interface_towards(ELSEWHERE) or interface_towards(ELSEWHERE_IPV6)
    except ConfigError:
        return None


def interface(name: str) -> Interface:
    """Facts about ``name``.

    Raises:
        ConfigError: there is no such interface here.
    """
    own = net.link_of(name)
    try:
        device, vlan = net.device_of(name)
        device_known = True
    except AttachError:  # the kernel says of such an interface that it takes no programs
        device, vlan, device_known = name, 0, False
    link = net.link_of(device)
    driver = net.driver_of(device) or None
    xdp = net.xdp_on(device)
    owner = pin.owner(name, xdp.prog_id) if xdp and device_known else None
    queues, offloads = _asked(ethtool.channels, device), _asked(ethtool.features, device) or {}
    fixed = _asked(partial(ethtool.features, fixed=True), device) or {}
    ipv6 = net.families_of(name) == {True}
    rx, tx = link.get_attr("IFLA_NUM_RX_QUEUES", 1), link.get_attr("IFLA_NUM_TX_QUEUES", 1)
    if queues is not None:
        rx, tx = queues.rx + queues.combined, queues.tx + queues.combined
    return Interface(
        name=name,
        device=device,
        up=bool(own["flags"] & 1),
        mtu=int(own.get_attr("IFLA_MTU")),
        device_mtu=int(link.get_attr("IFLA_MTU")),
        driver=driver,
        native_xdp=_native(link["index"], driver),
        rx_queues=int(rx),
        tx_queues=int(tx),
        tx_most=None if queues is None else queues.tx_most + queues.combined_most,
        rx_most=None if queues is None else queues.rx_most + queues.combined_most,
        gro_hw=offloads.get(ethtool.GRO_HW),
        gro_hw_fixed=fixed.get(ethtool.GRO_HW, False),
        lro=offloads.get(ethtool.LRO),
        vlan_stripping=not vlan and offloads.get(ethtool.RXVLAN),
        linear=_linear(name, device),
        hashes_udp_ports=_hashes_udp_ports(device, ipv6=ipv6),
        xdp_program=xdp.prog_id if xdp else None,
        xdp_name=_whose(name, xdp.prog_id, owner) if xdp else None,
        xdp_owner=owner,
        ipv6=ipv6,
    )


def _native(index: int, driver: str | None) -> bool | None:
    features = _xdp_features(index)
    if features is not None:
        return bool(features & _XDP_FEATURE_BASIC)
    return None if driver is None else driver in NATIVE_DRIVERS


def _xdp_features(index: int) -> int | None:
    """``xdp_features`` from the kernel's netdev family, or None before Linux 6.3."""

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


def _asked(question: Callable[[str], T], name: str) -> T | None:
    """What the driver says; None where it does not."""
    try:
        return question(name)
    except OSError:
        return None


def _hashes_udp_ports(name: str, *, ipv6: bool) -> bool | None:
    found = _asked(partial(ethtool.udp_hash, ipv6=ipv6), name)
    return None if found is None else found & ethtool.HASHES_PORTS == ethtool.HASHES_PORTS


def _linear(name: str, device: str) -> int:
    try:
        return linear_of(name)
    except AttachError:
        return 0 if net.driver_of(device) == "mlx5_core" else PAGE


def _whose(name: str, prog_id: int, owner: str | None) -> str | None:
    """Name of the program there; what is pinned is Tailbound's, if this process may not look at programs."""
    found = program_name(prog_id)
    if found or owner is not None:
        return found or WORKER
    try:
        return None if pin.settings(name) is None else WORKER
    except (AttachError, CapabilityError):
        return WORKER
