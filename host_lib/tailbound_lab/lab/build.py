"""Make a topology real: one function per kind of namespace, each run inside the namespace it builds.

No interface ever exists in the machine's own namespace: a veth pair is created with its peer already in the other one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from socket import if_nametoindex

from pyroute2 import IPRoute
from pyroute2.netlink import NLA_F_NESTED

from tailbound.errors import CapabilityError
from tailbound.kernel import ethtool
from tailbound.kernel.net import netlink
from tailbound.wire.address import is_ipv6
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.topology import IPV6_NETWORK, LINKS, Link, Topology, Worker

#: States of the kernel's bridge, of the five of spanning tree.
DISABLED, FORWARDING = 0, 3
_AF_BRIDGE = 7
#: A static entry in the bridge's own table: ``bridge fdb add MAC dev PORT master static``.
_NTF_MASTER, _NUD_NOARP = 0x04, 0x40
#: A cable's buffer holds this much time at its rate; a top-of-rack port's share is of this order.
_BUFFER_SECONDS = 0.025
#: ... and never less than this many bytes, four super-frames, or a burst could not pass at all.
_BUFFER_BYTES = 256 * 1024
#: ``TC_H_ROOT``: the parent of the queue that everything passes.
_ROOT = 0xFFFFFFFF
#: A host's own queue takes what its sockets hold, which then push back; 1000 frames of 64 KB are usual.
_HOST_BYTES = 64 << 20
#: Frames that wait before a veth whose other end receives by NAPI (XDP or GRO). Its ring holds 256 and drops
#: what is beyond, silently, unless there is a queue to push back to; a switch port and a NIC have one.
_QUEUE_FRAMES = 1000
#: Bytes that may leave at once. One super-frame, so that tbf does not cut it up.
_BURST_BYTES = 66_000
#: ... or so many frames, so that it does: tbf drops what is longer than its burst.
_SMOOTH_FRAMES = 3
#: ... and what a port may make up for, since its timer comes late on a busy machine: with 1 ms, as for a host, a port
#: was slower than the three workers that sent to it together, and its buffer overflowed.
_HOST_BURST_SECONDS, _BURST_SECONDS = 0.001, 0.005
#: ... and where the queue before it is reckoned with: what waits there in the books is to wait in earnest. A flow whose
#: round trip does not grow with the queue fills it with its smallest window: two segments in 0.24 ms are 100 Mbit/s.
_SMOOTH_BURST_SECONDS = 0.0004
_PORTS_UP_SECONDS = 10.0
#: Bytes of an Ethernet header.
_ETHERNET = 14
#: An address is used at once, without asking whether somebody has it.
_IFA_F_NODAD = 0x02
#: A connection keeps its window while it rests, and a new one takes over nothing from those before it. A lost tail is
#: sent again after 5 ms at the earliest, and not 200 (Linux 6.11).
_TUNED_TCP = {"tcp_slow_start_after_idle": 0, "tcp_no_metrics_save": 1, "tcp_rto_min_us": 5000}


class RateLimit:
    """tbf parameters for a rate in bits per second: bytes/s, burst bytes, buffer bytes.

    Args:
        host: on a worker's own interface, and not on a port of the network.
        smooth: next to the finite queue of a port, which super-frames would fill: they are cut up, and the port
            itself makes up for next to nothing.
    """

    def __init__(self, rate: int, *, host: bool = False, smooth: bool = False, mtu: int = 1500) -> None:
        self.rate = rate // 8
        least = _SMOOTH_FRAMES * (mtu + _ETHERNET) if smooth else _BURST_BYTES
        seconds = _HOST_BURST_SECONDS if host else _SMOOTH_BURST_SECONDS if smooth else _BURST_SECONDS
        self.burst = max(least, int(self.rate * seconds))
        self.limit = _HOST_BYTES if host else max(_BUFFER_BYTES, int(self.rate * _BUFFER_SECONDS))


def _quiet() -> None:
    """No IPv6, no reverse-path filter, no firewall between bridge ports; loopback up."""
    for key in ("all", "default"):
        namespaces.write_sysctl(f"net/ipv6/conf/{key}/disable_ipv6", 1)
        namespaces.write_sysctl(f"net/ipv4/conf/{key}/rp_filter", 0)
    for family in ("ip", "ip6", "arp"):
        namespaces.write_sysctl(f"net/bridge/bridge-nf-call-{family}tables", 0)
    with IPRoute() as ip:
        ip.link("set", index=if_nametoindex("lo"), state="up")


def _bridges(ip: IPRoute, mtu: int) -> dict[Link, int]:
    """One bridge a link, without spanning tree, IGMP snooping or delay; their indices."""
    found = {}
    for link in LINKS:
        ip.link(
            "add", ifname=link.bridge, kind="bridge", mtu=mtu,
            br_stp_state=0, br_forward_delay=0, br_mcast_snooping=0, br_ageing_time=0,
        )  # fmt: skip
        found[link] = if_nametoindex(link.bridge)
    return found


def _pair(ip: IPRoute, name: str, namespace: str, peer: str, mac: str | None, mtu: int, queues: int) -> int:
    """A veth here whose peer is born in ``namespace``; its index. As many queues as asked, at both ends."""
    other: dict[str, object] = {
        "ifname": peer, "net_ns_fd": namespace, "mtu": mtu, "num_tx_queues": queues, "num_rx_queues": queues,
    }  # fmt: skip
    if mac is not None:
        other["address"] = mac
    ip.link("add", ifname=name, kind="veth", mtu=mtu, num_tx_queues=queues, num_rx_queues=queues, peer=other)
    return if_nametoindex(name)


def _queue(ip: IPRoute, index: int, queues: int) -> None:
    """A first-in first-out queue for each send queue of an interface, whatever this machine's default is."""
    if queues == 1:
        ip.tc("replace", "pfifo", index=index, root=True, handle="1:", limit=_QUEUE_FRAMES)
        return
    ip.tc("replace", "mq", index=index, root=True, handle="1:")
    for number in range(1, queues + 1):
        ip.tc("replace", "pfifo", index=index, parent=0x10000 + number, limit=_QUEUE_FRAMES)


def _plug(ip: IPRoute, index: int, bridge: int, *, flood: bool) -> None:
    """Make a port of the bridge; nothing is learned, and unknown addresses are flooded only if asked."""
    ip.link("set", index=index, master=bridge)
    ip.brport("set", index=index, learning=0, unicast_flood=int(flood), mcast_flood=1, bcast_flood=1)
    ip.link("set", index=index, state="up")


def _switch(topology: Topology, mtu: int, queues: int, queued: bool) -> None:
    _quiet()
    with IPRoute() as ip:
        bridges = _bridges(ip, mtu)
        for link in LINKS:
            ip.link("set", index=bridges[link], state="up")
            for worker in topology.workers:
                name = link.port(worker.rank)
                if topology.cables:
                    index = _pair(ip, name, topology.cables[worker.rank], link.switch_port, None, mtu, queues)
                else:
                    mac = link.mac(worker.rank)
                    index = _pair(ip, name, worker.namespace, link.interface, mac, mtu, queues)
                _plug(ip, index, bridges[link], flood=False)
                if queued or link is Link.DATA:
                    _queue(ip, index, queues)
                ip.fdb("add", ifindex=index, lladdr=link.mac(worker.rank), flags=_NTF_MASTER, state=_NUD_NOARP)


def _cable(worker: Worker, mtu: int, queues: int) -> None:
    """Two ports that flood to each other and learn nothing: a wire, for whatever addresses pass."""
    _quiet()
    with IPRoute() as ip:
        bridges = _bridges(ip, mtu)
        for link in LINKS:
            mac = link.mac(worker.rank)
            index = _pair(ip, link.worker_port, worker.namespace, link.interface, mac, mtu, queues)
            for port in (index, if_nametoindex(link.switch_port)):
                _plug(ip, port, bridges[link], flood=True)
                _queue(ip, port, queues)
            ip.link("set", index=bridges[link], state="up")


def _worker(topology: Topology, worker: Worker, queues: int, queued: bool) -> None:
    """Addresses and permanent neighbours, so that no question for one is ever lost; TCP as on a tuned cluster."""
    _quiet()
    for key, value in _TUNED_TCP.items():
        namespaces.write_sysctl(f"net/ipv4/{key}", value)
    with IPRoute() as ip:
        for link in LINKS:
            index = if_nametoindex(link.interface)
            address = worker.address_on(link)
            if is_ipv6(address):
                _allow_ipv6(link.interface)
                ip.addr("add", index=index, address=address, prefixlen=IPV6_NETWORK.prefixlen, flags=_IFA_F_NODAD)
            else:
                ip.addr(
                    "add", index=index, address=address, prefixlen=link.network.prefixlen,
                    broadcast=str(link.network.broadcast_address),
                )  # fmt: skip
            ip.link("set", index=index, state="up")
            if queued:
                _queue(ip, index, queues)
            for other in topology.workers:
                if other.rank != worker.rank:
                    ip.neigh(
                        "add", ifindex=index, dst=other.address_on(link), lladdr=link.mac(other.rank),
                        state="permanent",
                    )  # fmt: skip
            there = link.switch_address(ipv6=is_ipv6(address))
            ip.neigh("add", ifindex=index, dst=there, lladdr=link.switch_mac, state="permanent")


def _allow_ipv6(interface: str) -> None:
    """With little of what IPv6 sends by itself: no router is asked for, no address made or tried. Groups are told."""
    for key, value in {"accept_ra": 0, "router_solicitations": 0, "addr_gen_mode": 1, "disable_ipv6": 0}.items():
        namespaces.write_sysctl(f"net/ipv6/conf/{interface}/{key}", value)


def _background_ports(topology: Topology, name: str, mtu: int) -> None:
    """The switch's ports towards the background; nothing is ever sent to it, so nothing is flooded there."""
    with IPRoute() as ip:
        for link in LINKS:
            index = _pair(ip, link.background_port, name, link.interface, link.background_mac, mtu, 1)
            ip.link("set", index=index, master=if_nametoindex(link.bridge))
            ip.brport("set", index=index, learning=0, unicast_flood=0, mcast_flood=0, bcast_flood=0)
            ip.link("set", index=index, state="up")


def _background(topology: Topology) -> None:
    """Addresses of nobody, one behind every worker's MAC."""
    _quiet()
    with IPRoute() as ip:
        for link in LINKS:
            index = if_nametoindex(link.interface)
            ip.addr("add", index=index, address=link.background_address, prefixlen=link.network.prefixlen)
            ip.link("set", index=index, state="up")
            for worker in topology.workers:
                ip.neigh(
                    "add", ifindex=index, dst=link.nobody(worker.rank), lladdr=link.mac(worker.rank), state="permanent"
                )


def _wait_forwarding(ports: Sequence[str]) -> None:
    """The bridge turns a port on from a work queue of the kernel; wait until it did."""
    with IPRoute() as ip:
        indices = {name: if_nametoindex(name) for name in ports}
        end = time.monotonic() + _PORTS_UP_SECONDS
        for name, index in indices.items():
            while _port_state(ip, index) != FORWARDING:
                if time.monotonic() > end:
                    raise CapabilityError(
                        f"bridge port {name} does not come up within {_PORTS_UP_SECONDS:.0f} s: try again, see `dmesg`"
                    )
                time.sleep(0.002)


def _port_state(ip: IPRoute, index: int) -> int | None:
    """State of a bridge port, None if it is no port."""
    info = ip.get_links(index)[0].get_attr("IFLA_LINKINFO")
    data = info.get_attr("IFLA_INFO_SLAVE_DATA") if info is not None else None
    return None if data is None else data.get_attr("IFLA_BRPORT_STATE")


def set_port_state(interface: str, state: int) -> None:
    """Put ``interface``, a bridge port of the calling thread's namespace, into ``state``.

    Raises:
        OSError: no such interface, no port, or no privilege.
    """
    # pyroute2 takes a port's `state` for that of the link, which would drop the carrier
    attribute = ("IFLA_PROTINFO", {"attrs": [("IFLA_BRPORT_STATE", state)]}, NLA_F_NESTED)
    with netlink() as ip:
        ip.link("update", index=if_nametoindex(interface), family=_AF_BRIDGE, attrs=[attribute])


def build(topology: Topology, *, mtu: int, queues: int, wire: bool) -> None:
    """Make every namespace and interface of ``topology``; returns when all ports forward.

    ``wire``: XDP will be put on all inner ends, so every end needs a queue.

    Raises:
        CapabilityError: not root, or the kernel lacks veth or bridge.
        OSError, pyroute2.NetlinkError: what the kernel said. What exists by then is the caller's to remove.
    """
    for name in topology.namespaces:
        namespaces.create(name)

    def inside(name: str, function: partial[None]) -> None:
        namespaces.call(name, function, patient=True)

    inside(topology.switch, partial(_switch, topology, mtu, queues, wire or bool(topology.cables)))
    for cable, worker in zip(topology.cables, topology.workers, strict=False):
        inside(cable, partial(_cable, worker, mtu, queues))
    for worker in topology.workers:
        inside(worker.namespace, partial(_worker, topology, worker, queues, wire))
    for cable in topology.cables:
        ports = [port for link in LINKS for port in (link.worker_port, link.switch_port)]
        inside(cable, partial(_wait_forwarding, ports))
    ports = [link.port(worker.rank) for worker in topology.workers for link in LINKS]
    if topology.background is not None:
        inside(topology.switch, partial(_background_ports, topology, topology.background, mtu))
        inside(topology.background, partial(_background, topology))
        ports += [link.background_port for link in LINKS]
    inside(topology.switch, partial(_wait_forwarding, ports))


def set_rate(interface: str, rate: int | None, *, host: bool = False, smooth: bool = False) -> None:
    """Limit what leaves ``interface`` (of the calling thread's namespace) to ``rate`` bit/s; None: no limit.

    ``host``, ``smooth``: see ``RateLimit``.
    """
    with IPRoute() as ip:
        index = if_nametoindex(interface)
        root = next(qdisc for qdisc in ip.get_qdiscs(index) if qdisc["parent"] == _ROOT)
        kind = "tbf"
        # the kind of a root queue cannot be changed in place, and what nobody has chosen (no handle) not taken away
        if root["handle"] and (rate is None or root.get_attr("TCA_KIND") != kind):
            ip.tc("del", index=index, root=True)
        if rate is None:
            _queue(ip, index, ethtool.channels(interface).tx)
            return
        (link,) = ip.get_links(index)
        tbf = RateLimit(rate, host=host, smooth=smooth, mtu=link.get_attr("IFLA_MTU"))
        ip.tc("replace", kind, index=index, root=True, handle="1:", rate=tbf.rate, burst=tbf.burst, limit=tbf.limit)


def send_single_frames(interfaces: Sequence[str]) -> None:
    """Cut super-frames before they leave ``interfaces`` (of the calling thread's namespace); TCP makes none."""
    with IPRoute() as ip:
        for name in interfaces:
            ip.link("set", index=if_nametoindex(name), gso_max_segs=1)
