"""Independent losses on a lab's cables where no XDP program may be loaded: in place of ``inject.Injector``.

Filters of classic BPF, which the kernel takes from whoever owns the network namespace: at the ``clsact`` hooks
(``cls_bpf``, direct action), with the ancillary load that returns a random number. They have no memory, so no seed
repeats their losses; pyroute2 has no way to send their instructions. Both ends of a cable drop: UDP at the worker's
end, everything else at the switch's, because the kernel counts what is dropped by interface alone.
"""

from __future__ import annotations

import os
import socket
import struct

from pyroute2 import IPRoute, NetlinkError

from tailbound.errors import CapabilityError
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.faults import Fault, FaultCounts, Way, end_settings
from tailbound_lab.lab.topology import LINKS, Link, Topology

#: Parents of filters at a clsact, for what enters and for what leaves (linux/pkt_sched.h).
_PARENTS = 0xFFFFFFF2, 0xFFFFFFF3
_RTM_NEWTFILTER, _FLAGS, _NLMSG_ERROR = 44, 0x1 | 0x4 | 0x400, 2  # request, answer, create
_NLA_NESTED, _TCA_KIND, _TCA_OPTIONS = 1 << 15, 1, 2
_OPS_LEN, _OPS, _BPF_FLAGS, _DIRECT = 4, 5, 8, 1
_ETH_P_ALL, _PRIORITY, _HANDLE = 3, 1, 1

_LDH, _LDB, _LD, _JEQ, _JGE, _RET = 0x28, 0x30, 0x20, 0x15, 0x35, 0x06
_RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
_ETHERTYPE_AT, _IPV4, _IPV6, _PROTOCOL_AT, _NEXT_HEADER_AT, _TCP, _UDP = 12, 0x0800, 0x86DD, 23, 20, 6, 17
_NEXT, _DROP = 0xFFFFFFFF, 2  # TC_ACT_UNSPEC, TC_ACT_SHOT


class LossFilters:
    """Filters on all cables of a built topology; they go with the namespaces.

    Args:
        topology: with cables.
        fault: of ``loss`` alone.

    Raises:
        CapabilityError: ``fault`` asks for more, or the kernel has no such filters.
    """

    def __init__(self, topology: Topology, fault: Fault) -> None:
        self._cables = topology.cables
        for cable in self._cables:
            namespaces.call(cable, _prepare, patient=True)
        self.set(fault)

    def _select(self, rank: int | None) -> tuple[str, ...]:
        return self._cables if rank is None else self._cables[rank : rank + 1]

    def set(self, fault: Fault, rank: int | None = None, link: Link | None = None, way: Way | None = None) -> None:
        """As ``Injector.set``.

        Raises:
            CapabilityError: ``fault`` asks for more than ``loss``, or only one direction is to lose.
        """
        if more := [*fault.beyond_loss, *([] if way is None else ["losses in one direction"])]:
            raise CapabilityError(
                f"{', '.join(more)} need XDP programs, and these need root: run it with sudo, or ask for loss alone"
            )
        links = LINKS if link is None else (link,)
        for cable in self._select(rank):
            namespaces.call(cable, _set, links, end_settings(fault).loss_good, patient=True)

    def counts(self, rank: int | None = None, link: Link | None = None) -> FaultCounts:
        """As ``Injector.counts``."""
        total = FaultCounts()
        for cable in self._select(rank):
            total += namespaces.call(cable, _counts, LINKS if link is None else (link,), patient=True)
        return total

    def close(self) -> None:
        """Nothing is left to do."""


def _prepare() -> None:
    """A clsact on all ports of a cable."""
    with IPRoute() as ip:
        for port in (port for link in LINKS for port in (link.worker_port, link.switch_port)):
            try:
                ip.tc("add", "clsact", index=ip.link_lookup(ifname=port)[0])
            except NetlinkError as error:
                raise CapabilityError(
                    f"cannot lose packets: {error}; use a kernel with CONFIG_NET_SCH_INGRESS"
                ) from error


def _set(links: tuple[Link, ...], probability: float) -> None:
    for link in links:
        for parent in _PARENTS:
            _put(link.worker_port, parent, _program(probability, udp=True))
            _put(link.switch_port, parent, _program(probability, udp=False))


def _counts(links: tuple[Link, ...]) -> FaultCounts:
    seen = lost = other = sent = 0
    with IPRoute() as ip:
        for link in links:
            ends = [ip.link_lookup(ifname=port)[0] for port in (link.worker_port, link.switch_port)]
            udp, rest = (_dropped(ip, index) for index in ends)
            from_worker, to_worker = (ip.get_links(i)[0].get_attr("IFLA_STATS64")["rx_packets"] for i in ends)
            seen, sent = seen + from_worker + to_worker, sent + from_worker
            lost, other = lost + udp + rest, other + rest
    return FaultCounts(seen=seen, lost=lost, lost_other=other, sent=sent)


def _program(probability: float, *, udp: bool) -> bytes:
    """Instructions that drop packets with ``probability``: those of UDP, or all the others.

    Of IPv6 the others are those of TCP, as for the fault program: neighbour discovery and extension headers pass.
    """
    threshold = min(round(probability * 2**32), 2**32 - 1)
    # jumps count from the next instruction; 10 lets the packet pass
    steps = (
        (_LDH, 0, 0, _ETHERTYPE_AT),
        (_JEQ, 3, 0, _IPV6),
        (_JEQ, 0, 7, _IPV4),
        (_LDB, 0, 0, _PROTOCOL_AT),
        (_JEQ, 2, 5, _UDP) if udp else (_JEQ, 5, 2, _UDP),
        (_LDB, 0, 0, _NEXT_HEADER_AT),
        (_JEQ, 0, 3, _UDP if udp else _TCP),
        (_LD, 0, 0, _RANDOM),
        (_JGE, 1, 0, threshold),
        (_RET, 0, 0, _DROP),
        (_RET, 0, 0, _NEXT),
    )
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _put(interface: str, parent: int, instructions: bytes) -> None:
    """Put a filter on an interface that has a clsact, in place of an older one.

    Raises:
        CapabilityError: the kernel refuses, for want of CONFIG_NET_CLS_BPF perhaps.
    """
    options = (
        _attribute(_OPS_LEN, struct.pack("=H", len(instructions) // 8))
        + _attribute(_OPS, instructions)
        + _attribute(_BPF_FLAGS, struct.pack("=I", _DIRECT))
    )
    info = _PRIORITY << 16 | socket.htons(_ETH_P_ALL)
    body = struct.pack("=BxHiIII", 0, 0, socket.if_nametoindex(interface), _HANDLE, parent, info)
    body += _attribute(_TCA_KIND, b"bpf\0") + _attribute(_TCA_OPTIONS | _NLA_NESTED, options)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.send(struct.pack("=IHHII", 16 + len(body), _RTM_NEWTFILTER, _FLAGS, 1, 0) + body)
        reply = netlink.recv(65536)
    kind, error = struct.unpack_from("=4xH10xi", reply)
    if kind != _NLMSG_ERROR or error != 0:
        raise CapabilityError(
            f"cannot put a filter on {interface}: {os.strerror(-error)}; use a kernel with CONFIG_NET_CLS_BPF"
        )


def _dropped(ip: IPRoute, index: int) -> int:
    """Packets that the filters of an interface have dropped, both ways."""
    return sum(
        q.get_attr("TCA_STATS2").get_attr("TCA_STATS_QUEUE")["drops"]
        for q in ip.get_qdiscs(index)
        if q.get_attr("TCA_KIND") == "clsact"
    )


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)
