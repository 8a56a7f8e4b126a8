"""A filter that drops a share of the packets that enter or leave an interface, without any privilege over BPF.

Classic BPF, which the kernel takes from whoever owns the network namespace: at the ``clsact`` hook (``cls_bpf``, direct
action), with the ancillary load that returns a random number. It has no memory, so losses are independent and no seed
repeats them; pyroute2 has no way to send its instructions.
"""

from __future__ import annotations

import os
import socket
import struct

from pyroute2 import IPRoute

__all__ = ["EGRESS", "INGRESS", "dropped", "program", "put"]

#: Parents of filters at a clsact (linux/pkt_sched.h).
INGRESS, EGRESS = 0xFFFFFFF2, 0xFFFFFFF3

_RTM_NEWTFILTER, _FLAGS, _NLMSG_ERROR = 44, 0x1 | 0x4 | 0x400, 2  # request, answer, create
_NLA_NESTED, _TCA_KIND, _TCA_OPTIONS = 1 << 15, 1, 2
_OPS_LEN, _OPS, _BPF_FLAGS, _DIRECT = 4, 5, 8, 1
_ETH_P_ALL, _PRIORITY, _HANDLE = 3, 1, 1

_LDH, _LDB, _LD, _JEQ, _JGE, _RET = 0x28, 0x30, 0x20, 0x15, 0x35, 0x06
_RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
_ETHERTYPE_AT, _IPV4, _IPV6, _PROTOCOL_AT, _NEXT_HEADER_AT, _TCP, _UDP = 12, 0x0800, 0x86DD, 23, 20, 6, 17
_NEXT, _DROP = 0xFFFFFFFF, 2  # TC_ACT_UNSPEC, TC_ACT_SHOT


def program(probability: float, *, udp: bool) -> bytes:
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


def put(interface: str, parent: int, instructions: bytes) -> None:
    """Put a filter on an interface that has a clsact, in place of an older one.

    Args:
        interface: its name, in the calling thread's namespace.
        parent: ``INGRESS`` or ``EGRESS``.
        instructions: of ``program``.

    Raises:
        OSError: the kernel refuses, for want of CONFIG_NET_CLS_BPF perhaps.
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
        raise OSError(-error, f"cannot put a filter on {interface}: {os.strerror(-error)}")


def dropped(ip: IPRoute, index: int) -> int:
    """Packets that the filters of an interface have dropped, both ways."""
    return sum(
        q.get_attr("TCA_STATS2").get_attr("TCA_STATS_QUEUE")["drops"]
        for q in ip.get_qdiscs(index)
        if q.get_attr("TCA_KIND") == "clsact"
    )


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)
