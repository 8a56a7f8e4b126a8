"""A channel over which one burst reaches all live peers: copies are made further on, in the kernel or in the network.

To the send queue it is one more destination, with a number above those of ranks. What leaves over it counts for every
rank that gets a copy, so that books and rates by peer stay what they are with a burst for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tailbound.transport.counts import PeerCounts
from tailbound.transport.sockets import UdpSocket
from tailbound.wire.schema import MAX_RANKS

#: Channels of this kind that a sender has at most (fan-out and multicast).
SHARED_MOST = 2
#: Destinations that can be told apart: ranks, and the channels that stand for many.
DESTINATIONS = MAX_RANKS + SHARED_MOST


@dataclass
class Shared:
    """One such channel.

    Attributes:
        name: what it is called in events and counters.
        sockets: bound; nothing else leaves over them. Bursts take them in turn.
        target: (IPv4 address, UDP port) that bursts are addressed to; may change between two bursts.
        ranks: who gets a copy of what leaves from now on.
        local: whether this host makes the copies: a burst then costs it as much as one for every rank.
        counts: of the bursts themselves; what their copies were is counted by rank.
        broken: a burst was refused for good: the network below is not what it was taken for.
    """

    name: str
    sockets: tuple[UdpSocket, ...]
    target: tuple[str, int] = ("", 0)
    ranks: tuple[int, ...] = ()
    local: bool = True
    counts: PeerCounts = field(default_factory=PeerCounts)
    broken: bool = False

    @property
    def cost(self) -> int:
        """Bursts that this host's kernel is busy with for one that is handed to it."""
        return max(1, len(self.ranks)) if self.local else 1

    def took(self, by_rank: dict[int, PeerCounts], packets: int, size: int, bursts: int) -> None:
        """Counts ``packets`` of ``size`` bytes together, in ``bursts``, for everybody who gets a copy."""
        self.counts.packets += packets
        self.counts.bytes += size
        self.counts.bursts += bursts
        for rank in self.ranks:
            by_rank[rank].packets += packets
            by_rank[rank].bytes += size

    def lose(self, by_rank: dict[int, PeerCounts], packets: int) -> None:
        """Counts ``packets`` that were given up."""
        self.counts.lost += packets
        for rank in self.ranks:
            by_rank[rank].lost += packets

    def take_back(self, by_rank: dict[int, PeerCounts], failed: Iterable[tuple[int, int, int]]) -> None:
        """Copies that were counted and could not be made: (rank, packets, bytes)."""
        for rank, packets, size in failed:
            by_rank[rank].packets -= packets
            by_rank[rank].bytes -= size
            by_rank[rank].lost += packets
