"""IP multicast of one job: its group, and the membership that makes switches deliver it.

Every rank is a member (IGMP) as long as its job runs; that is what a snooping bridge or switch goes by. Rows sent to
the group are taken by the program on the interface, as all rows are.
"""

from __future__ import annotations

import ipaddress
import socket

from tailbound.errors import CapabilityError, ConfigError

#: Groups of an organisation's own (RFC 2365): one of 2 ** 18 by the job's cookie, unless one is given.
RANGE = ipaddress.IPv4Network("239.192.0.0/14")
#: Hops: within the organisation.
_TTL = 16


def group_of(cookie: int, given: str = "") -> str:
    """The group of the job with ``cookie``: ``given``, else one of ``RANGE``.

    Raises:
        ConfigError: ``given`` is no IPv4 multicast address.
    """
    if given:
        check_group(given)
        return given
    return str(RANGE[cookie % RANGE.num_addresses])


def check_group(given: str) -> None:
    """Refuses what is no group.

    Raises:
        ConfigError: not an IPv4 multicast address, or one of the link's own (224.0.0.0/24).
    """
    try:
        address = ipaddress.IPv4Address(given)
    except ValueError:
        address = ipaddress.IPv4Address(0)
    if not address.is_multicast or address in ipaddress.IPv4Network("224.0.0.0/24"):
        raise ConfigError(f"multicast group {given!r}: give an IPv4 address of 224.0.1.0..239.255.255.255")


def join(sock: socket.socket, group: str, address: str) -> None:
    """Makes the interface with ``address`` a member of ``group`` until ``sock`` is closed.

    What the socket sends to groups leaves that interface, and does not come back to this host.

    Raises:
        CapabilityError: the interface or this system takes no members.
    """
    own = socket.inet_aton(address)
    try:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, _TTL)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(group) + own)
    except OSError as error:
        raise CapabilityError(
            f"{group} cannot be joined at {address} ({error.strerror}): use TAILBOUND_RESULT=fanout or peers"
        ) from error
