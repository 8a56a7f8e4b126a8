"""Where packets for an address go next, as the kernel knows it: routes and neighbour table, over rtnetlink.

A gateway is the next hop of what lies behind it. What is not in the table yet gets there by an empty datagram.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from tailbound.errors import CapabilityError
from tailbound.kernel import interfaces
from tailbound.wire.address import family_of

#: NUD_REACHABLE, STALE, DELAY, PROBE and PERMANENT (<linux/neighbour.h>): the kernel sends to these at once.
_USABLE = 0x02 | 0x04 | 0x08 | 0x10 | 0x80
_ARPHRD_ETHER = 1
_DISCARD = 9
#: How a neighbour is asked for its Ethernet address.
_QUESTION = {socket.AF_INET: "ARP", socket.AF_INET6: "neighbour discovery"}


def next_hops(interface: str, addresses: Iterable[str], patience: float = 1.0) -> dict[str, bytes]:
    """Ethernet addresses (6 bytes) to which packets for ``addresses`` (IP, of one family) leave ``interface``.

    Args:
        patience: seconds to wait for answers to ARP or neighbour discovery.

    Raises:
        ConfigError: no such interface.
        CapabilityError: no Ethernet interface, an address that is reached another way, or one that nobody answers for.
    """
    index = interfaces.index_of(interface)
    with IPRoute() as route:
        (link,) = route.get_links(index)
        if link["ifi_type"] != _ARPHRD_ETHER:
            raise CapabilityError(
                f"{interface} is no Ethernet interface, next hops have no addresses there: use result='peers'"
            )
        family = family_of(next(iter(addresses := list(addresses)), ""))
        hops = {address: _hop(route, interface, index, address) for address in addresses}
        until = time.monotonic() + patience
        asked: set[str] = set()
        while True:
            known = _neighbours(route, index, family)
            missing = {address: hop for address, hop in hops.items() if hop not in known}
            if not missing:
                return {address: known[hop] for address, hop in hops.items()}
            if time.monotonic() > until:
                raise CapabilityError(
                    f"nobody at {interface} answers {_QUESTION[family]} for {', '.join(sorted(missing.values()))}: "
                    "is it the interface that leads to the other ranks?"
                )
            _ask(address for address in missing if address not in asked)
            asked.update(missing)
            time.sleep(0.002)


def _hop(route: IPRoute, interface: str, index: int, address: str) -> str:
    try:
        (found,) = route.route("get", dst=address, family=family_of(address))
    except NetlinkError as error:
        raise CapabilityError(
            f"no route to {address} ({error}): is it in the same network? See `ip route get {address}`"
        ) from error
    if found.get_attr("RTA_OIF") != index:
        raise CapabilityError(
            f"the route to {address} does not leave by {interface}: give the interface that it leaves by"
        )
    if found.get_attr("RTA_VIA") is not None:
        raise CapabilityError(f"the next hop to {address} is of another family of IP: give it a route by its own")
    gateway = found.get_attr("RTA_GATEWAY")
    return address if gateway is None else str(gateway)


def _neighbours(route: IPRoute, index: int, family: socket.AddressFamily) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    entry: Any
    for entry in route.get_neighbours(family=family, ifindex=index):
        mac = entry.get_attr("NDA_LLADDR")
        if mac is not None and entry["state"] & _USABLE:
            found[entry.get_attr("NDA_DST")] = bytes.fromhex(mac.replace(":", ""))
    return found


def _ask(addresses: Iterable[str]) -> None:
    for address in addresses:
        # what is refused is said by whoever waits for the answer
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.sendto(b"", (address, _DISCARD))
