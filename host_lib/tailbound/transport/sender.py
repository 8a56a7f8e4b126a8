"""Sockets, channels and counters of what a rank sends; it leaves by ``SendQueue``.

Sending never raises: what cannot be sent is counted per peer and, to the protocol, is lost like any other packet.

A shared channel is one over which a burst reaches all live peers: copies are made further on, in the kernel or in the
network. To the send queue it is one more destination, with a number above those of ranks. What leaves over it counts
for every rank that gets a copy, so that counters and rates by peer stay what they are with a burst for each.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailbound.errors import ConfigError
from tailbound.transport.sockets import Socket, UdpSocket
from tailbound.wire.packets import record_of
from tailbound.wire.schema import SHARED_MOST, TARGET


class Target(record_of(TARGET)):  # type: ignore[misc]
    """``tb_target``: a rank or a shared channel, and what has become of packets for it; the send queue counts, too.

    Attributes:
        errors: refused calls by errno name.
    """

    errors: dict[str, int]

    def snapshot(self) -> dict[str, Any]:
        """What left and what did not, in plain types."""
        left = {"packets": self.packets, "bytes": self.bytes, "calls": self.bursts}
        return {**left, "lost": self.lost, "errors": dict(self.errors)}


@dataclass
class Shared:
    """A channel over which one burst reaches all live peers.

    Attributes:
        name: what it is called in events and counters.
        socket: bound; nothing else leaves over it.
        target: (IP address, UDP port) that bursts are addressed to; may change between two bursts.
        ranks: who gets a copy of what leaves from now on.
        local: whether this host makes the copies: a burst then costs it as much as one for every rank.
        counts: of the bursts themselves; what their copies were is counted by rank.
        broken: a burst was refused for good: the network below is not what it was taken for.
    """

    name: str
    socket: UdpSocket
    target: tuple[str, int] = ("", 0)
    ranks: tuple[int, ...] = ()
    local: bool = True
    counts: Target = field(init=False)
    broken: bool = False

    @property
    def cost(self) -> int:
        """Bursts that this host's kernel is busy with for one that is handed to it."""
        return max(1, len(self.ranks)) if self.local else 1


#: What a full socket and a full device queue answer.
FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)


class Sender:
    """Sockets, which the caller owns (and closes), and by whom each is used.

    Args:
        sockets: bound UDP sockets. Single packets leave over the first one. With more, bursts leave over the others,
            as many for each peer as there are, at least one as far as they last: what waits in front of a slow peer
            then takes no room from the rest, and a peer's receive-side scaling sees several source ports.
        peers: (IP address, UDP port) by rank.

    Raises:
        ConfigError: no socket.
    """

    def __init__(self, sockets: Sequence[Socket], peers: Mapping[int, tuple[str, int]]) -> None:
        if not sockets:
            raise ConfigError("no socket: give a sender at least one that is bound")
        self.sockets = list(sockets)
        self.rooms = [sock.room() for sock in sockets]  #: bytes that may wait in each
        self.peers = dict(peers)
        self.ranks = 1 + max(self.peers, default=0)  #: destinations below it are ranks, and others shared channels
        self.targets: Any = (Target * (self.ranks + SHARED_MOST))()  # type: ignore[operator]
        self.counts = {rank: self._counted(rank) for rank in self.peers}  #: and by number of a shared channel
        self.plain: set[int] = set()  #: ranks, and shared channels, to which GSO does not work
        self.refused: dict[int, set[int]] = {}  #: ranks by errno; ``Paths`` empties it
        data = range(1, len(self.sockets)) if len(self.sockets) > 1 else range(1)
        each = max(1, len(data) // max(1, len(self.peers)))
        #: sockets of every channel, as indices into ``sockets``; bursts of a channel take them in turn
        self.ports = [tuple(data[i : i + each]) for i in range(0, len(data) - each + 1, each)]
        #: channel that bursts for a rank leave over, those of ``shared`` among them
        self.channel = {rank: i % len(self.ports) for i, rank in enumerate(self.peers)}
        #: channels that reach many ranks at once, by the number that stands for them where a rank is meant
        self.shared: dict[int, Shared] = {}

    def share(self, channel: Shared) -> int:
        """Adds a channel, for a send queue alone; returns its number. Before the queue is used, by whoever waits on
        ``sockets``.

        Raises:
            ConfigError: there are ``SHARED_MOST`` already.
        """
        if len(self.shared) == SHARED_MOST:
            raise ConfigError(f"a sender's shared channels: give {SHARED_MOST} at most")
        number = self.ranks + len(self.shared)
        self.shared[number] = channel
        channel.counts = self.counts[number] = self._counted(number)
        self.channel[number] = len(self.ports)
        self.ports.append((len(self.sockets),))
        self.sockets.append(channel.socket)
        self.rooms.append(channel.socket.room())
        return number

    def _counted(self, to: int) -> Target:
        target: Target = self.targets[to]
        target.errors = {}
        return target

    @property
    def room(self) -> int:
        """Bytes that may wait in this host: in all sockets, and of each copy that it makes of what is in one.

        A burst for all leaves its socket behind its copies, and these belong to no socket (``kernel.fanout``).
        """
        more = ((one.cost - 1, *self.ports[self.channel[number]]) for number, one in self.shared.items())
        return sum(self.rooms) + sum(copies * self.rooms[port] for copies, port in more)

    def took(self, rank: int, packets: int, size: int, bursts: int) -> None:
        """Counts ``packets`` of ``size`` bytes together that left for ``rank`` in ``bursts``, past the send queue."""
        counts = self.counts[rank]
        counts.packets += packets
        counts.bytes += size
        counts.bursts += bursts

    def refuse(self, rank: int, number: int) -> None:
        """Counts a refused call by its errno; below 0: that of a burst, which leaves in single packets."""
        if number < 0:
            self.plain.add(rank)
        else:
            ranks = self.shared[rank].ranks if rank in self.shared else (rank,)
            self.refused.setdefault(number, set()).update(ranks)
        errors, name = self.counts[rank].errors, errno.errorcode.get(abs(number), str(number))
        errors[name] = errors.get(name, 0) + 1
