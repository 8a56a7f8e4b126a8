"""Block and unblock a port of a bridge: the one netlink message that pyroute2 has no way to send.

(Its ``state`` of a bridge port is taken for the state of the link, which would drop the carrier.)
"""

from __future__ import annotations

import os
import socket
import struct

__all__ = ["DISABLED", "FORWARDING", "set_state"]

#: States of the kernel's bridge, of the five of spanning tree.
DISABLED, FORWARDING = 0, 3

_RTM_SETLINK, _NLM_F_REQUEST, _NLM_F_ACK, _NLMSG_ERROR = 19, 1, 4, 2
_AF_BRIDGE, _IFLA_PROTINFO, _NLA_F_NESTED, _IFLA_BRPORT_STATE = 7, 12, 1 << 15, 1


def set_state(interface: str, state: int) -> None:
    """Put ``interface``, a bridge port of the calling thread's namespace, into ``state``.

    Raises:
        OSError: no such interface, no port, or no privilege.
    """
    attribute = struct.pack("=HHB3x", 5, _IFLA_BRPORT_STATE, state)
    nested = struct.pack("=HH", 4 + len(attribute), _IFLA_PROTINFO | _NLA_F_NESTED) + attribute
    body = struct.pack("=BxHiII", _AF_BRIDGE, 0, socket.if_nametoindex(interface), 0, 0) + nested
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.send(struct.pack("=IHHII", 16 + len(body), _RTM_SETLINK, _NLM_F_REQUEST | _NLM_F_ACK, 1, 0) + body)
        reply = netlink.recv(65536)
    kind, error = struct.unpack_from("=4xH10xi", reply)
    if kind != _NLMSG_ERROR or error != 0:
        raise OSError(-error, f"cannot set the state of bridge port {interface}: {os.strerror(-error)}")
