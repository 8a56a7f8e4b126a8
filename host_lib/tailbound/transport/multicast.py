"""IP multicast of one job: its group, the membership that makes switches deliver it, the sockets, and the trials.

Every rank is a member (IGMP) as long as its job runs; that is what a snooping bridge or switch goes by. Rows sent to
the group are taken by the program on the interface, as all rows are; only packets that try the group reach the
member's socket.

Delivery cannot be told from outside: a bridge without a querier forgets its members, a storm control drops most, and
one port may be served and another not. So a rank sends ``ROUND`` small packets to the group, then a question to each
peer over the known way. A peer answers with how many of them it has heard. Once it has heard enough it is not tried
again. One peer that goes on hearing too few, or that later complains of missing rows, ends multicast for the whole
job. Silence says nothing about the fabric.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence

from tailbound.errors import CapabilityError, ConfigError
from tailbound.forks import keep_from_children
from tailbound.transport.sockets import reserve
from tailbound.wire.schema import HEADER_BYTES

#: Groups of an organisation's own (RFC 2365): one of 2 ** 18 by the job's cookie, unless one is given.
RANGE = ipaddress.IPv4Network("239.192.0.0/14")
#: Hops: within the organisation.
_TTL = 16
#: Of a member's socket: 64 ranks that try the group at the same time send 1008 packets, and one that has come by way of
#: XDP takes a page. What does not fit counts as not delivered.
_ROOM = 8 << 20
#: ``<linux/in.h>``: 0: only groups that this very socket has joined are delivered to it.
_IP_MULTICAST_ALL = 49
#: Packets of a round, and what must be heard of them.
ROUND, ENOUGH = 16, 12
#: ns between a round and its questions, and for which a peer may answer that it hears too few, since it may just have
#: joined.
BEAT, PATIENCE = 50_000_000, 2_000_000_000
#: With more peers a beat is longer in proportion: a rank hears the packets of all.
FEW = 8


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


class GroupMember:
    """A member of ``group`` on the interface with ``address``, until ``close``; hears what comes to ``port``.

    Args:
        admit: whether a payload may come from an IP address.

    Raises:
        CapabilityError: the interface or this system takes no members.
    """

    def __init__(self, group: str, port: int, address: str, admit: Callable[[bytes, str], bool]) -> None:
        self.group, self._admit = group, admit
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self.socket.setblocking(False)
            reserve(self.socket, socket.SO_RCVBUF, _ROOM)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.setsockopt(socket.IPPROTO_IP, _IP_MULTICAST_ALL, 0)
            self.socket.bind((group, port))
            request = socket.inet_aton(group) + socket.inet_aton(address)
            self.socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)
            keep_from_children(self)
        except OSError as error:
            self.socket.close()
            raise CapabilityError(
                f"{group} cannot be joined at {address} ({error.strerror}): use TAILBOUND_RESULT=fanout or peers"
            ) from error

    def descriptors(self) -> list[int]:
        """See ``forks.Owner``."""
        return [self.socket.fileno()] if self.socket.fileno() >= 0 else []

    def packets(self, most: int = 2048) -> list[bytes]:
        """UDP payloads since the last call, at most ``most``; never blocks. Bodies are cut to what a trial has."""
        out: list[bytes] = []
        while len(out) < most:
            try:
                data, source = self.socket.recvfrom(2 * HEADER_BYTES)
            except OSError:  # nothing more; or the interface has gone down, which its packets will tell
                break
            if self._admit(data, source[0]):
                out.append(data)
        return out

    def close(self) -> None:
        """Leaves the group; may be called twice."""
        self.socket.close()


def prepare(sock: socket.socket, address: str) -> None:
    """Lets what ``sock`` sends to groups leave the interface with ``address``, and not come back to this host.

    Raises:
        CapabilityError: this system does not let it.
    """
    try:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, _TTL)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)
    except OSError as error:
        raise CapabilityError(
            f"multicast cannot be sent from {address} ({error.strerror}): use TAILBOUND_RESULT=fanout or peers"
        ) from error


class Trials:
    """Whether the own packets to the group reach the peers: tried until each has heard enough once. Pure.

    Attributes:
        reached: ranks that have heard enough.
        failed: a rank that the group does not reach, and why multicast is given up; None: none so far.
        due: when to call ``poll`` again, in ns.
        number: of the newest round, which questions are about.
    """

    def __init__(self) -> None:
        self.reached: set[int] = set()
        self.failed: int | None = None
        self.due = 0
        self.number = 0
        self._asking = False
        self._bad: dict[int, int] = {}  # since when a rank has heard too few

    def poll(self, now: int, live: Sequence[int]) -> tuple[bool, list[int]]:
        """Whether to send a round to the group, and ranks to ask about the last one, with ``live`` peers."""
        self.reached.intersection_update(live)  # another process may come in the place of one that has left
        self._bad = {rank: since for rank, since in self._bad.items() if rank in live}
        waiting = [rank for rank in live if rank not in self.reached]
        if now < self.due or not waiting or self.failed is not None:
            return False, []
        self.due = now + BEAT * max(FEW, len(live)) // FEW
        self._asking = not self._asking
        if not self._asking:
            return False, waiting
        self.number += 1
        return True, []

    def answer(self, rank: int, number: int, heard: int, now: int) -> None:
        """``rank`` says how many packets of round ``number`` it has heard."""
        if number != self.number or rank in self.reached:
            return
        if heard >= ENOUGH:
            self.reached.add(rank)
            self._bad.pop(rank, None)
        elif now >= self._bad.setdefault(rank, now) + PATIENCE:
            self.failed = rank
