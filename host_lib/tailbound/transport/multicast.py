"""IP multicast of one job: its group, the membership that makes switches deliver it, the sockets, and the trials.

Every rank is a member (IGMP) as long as its job runs; that is what a snooping bridge or switch goes by. Rows sent to
the group are taken by the program on the interface, as all rows are; only packets that try the group reach the
member's socket.

Delivery cannot be told from outside: a bridge without a querier forgets its members, a storm control drops most, and
one port may be served and another not. So a rank sends ``ROUND`` small packets to the group, then a question to each
peer over the known way. A peer answers with a bitmap of the packets that it has heard. One peer that goes on hearing
too few ends multicast for the whole job. Silence says nothing about the fabric.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence

from tailbound.errors import CapabilityError, ConfigError
from tailbound.forks import keep_from_children
from tailbound.transport.sockets import reserve
from tailbound.wire.schema import HEADER_BYTES, serial_distance

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
#: ns between a round and its questions; from one trial to the next; and for which a peer may answer that it hears too
#: few, since it may just have joined.
BEAT, AGAIN, PATIENCE = 50_000_000, 5_000_000_000, 2_000_000_000
#: With more peers the first two are longer in proportion: a rank hears the packets of all.
FEW = 8
#: Packets of a sender that are remembered.
WINDOW = 64


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
                f"{group} cannot be joined at {address} ({error.strerror}): use result='fanout' or 'peers'"
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
            f"multicast cannot be sent from {address} ({error.strerror}): use result='fanout' or 'peers'"
        ) from error


class Trials:
    """Whether the own packets to the group reach the peers: tried at the start, and again each ``AGAIN``. Pure.

    Attributes:
        reached: ranks that have heard enough at least once.
        failed: a rank that the group does not reach, and why multicast is given up; None: none so far.
        due: when to call ``turn`` again, in ns.
        number: of the newest packet, which questions are about.
    """

    def __init__(self) -> None:
        self.reached: set[int] = set()
        self.failed: int | None = None
        self.due = 0
        self.number = 0
        self._asking = False
        self._passed: set[int] = set()  # in this trial
        self._bad: dict[int, int] = {}  # since when a rank has heard too few

    def turn(self, now: int, live: Sequence[int]) -> tuple[range, list[int]]:
        """Numbers of packets to send to the group, and ranks to ask about them, with ``live`` peers."""
        if now < self.due or not live or self.failed is not None:
            return range(0), []
        for rank in (self.reached | self._bad.keys()).difference(live):  # another process may come in its place
            self.reached.discard(rank)
            self._passed.discard(rank)
            self._bad.pop(rank, None)
        share = max(FEW, len(live)) / FEW
        waiting = [rank for rank in live if rank not in self._passed]
        if not waiting:
            self._passed.clear()
            self._asking = False
            self.due = now + int(AGAIN * share)
            return range(0), []
        self.due = now + int(BEAT * share)
        self._asking = not self._asking
        if not self._asking:
            return range(0), waiting
        self.number += ROUND
        return range(self.number - ROUND + 1, self.number + 1), []

    def answer(self, rank: int, number: int, heard: int, now: int) -> None:
        """``rank`` says which packets it has heard: bit i of ``heard`` stands for packet ``number`` - i."""
        if number != self.number:
            return
        if (heard & ((1 << ROUND) - 1)).bit_count() >= ENOUGH:
            self._passed.add(rank)
            self.reached.add(rank)
            self._bad.pop(rank, None)
        elif now >= self._bad.setdefault(rank, now) + PATIENCE:
            self.failed = rank


class Ears:
    """What has been heard of every sender's packets to the group."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[int, int]] = {}  # by sender: newest number, bits

    def hear(self, sender: int, number: int) -> None:
        """Packet ``number`` of ``sender`` has come."""
        newest, bits = self._heard.get(sender, (number, 0))
        ahead = serial_distance(number, newest)
        if ahead > 0:
            bits = bits << ahead if ahead < WINDOW else 0
            newest = number
        behind = serial_distance(newest, number)
        if behind < WINDOW:
            bits |= 1 << behind
        self._heard[sender] = newest, bits & (1 << WINDOW) - 1

    def answer(self, sender: int, number: int) -> int:
        """Which of the last 64 packets up to ``number`` have come: bit i for ``number`` - i."""
        newest, bits = self._heard.get(sender, (number, 0))
        ahead = serial_distance(number, newest)
        if abs(ahead) >= WINDOW:
            return 0
        return bits << ahead & (1 << WINDOW) - 1 if ahead >= 0 else bits >> -ahead
