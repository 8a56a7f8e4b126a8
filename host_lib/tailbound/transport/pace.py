"""How fast to send to each rank: by marks, and by round trips (clock-24). ``host_lib/core/send.c`` decides and spends.

A path begins at the speed of the link. Where the user says how fast that is, all ranks together are sent to no faster,
from the first row on: a virtual machine's interface takes more than its host lets through, and what waits in this
host's own queues is no queue of the network, though a round trip cannot tell. What a driver says is no such bound: a
container's interface says 10 Gbit/s whatever it takes. Two things lower the rate of a path:

- **Marks** (CE, RFC 3168), the share of the packets between two probes that came with one: DCTCP (SIGCOMM'10, section
  3.1), with a rate in place of a window. Departures from the paper, each because of what is here:

  - Once an echo and not once a round trip; there is one probe on the way, so these are the same.
  - Marks do not replace round trips: an echo with marks counts for both, the lower rate holds, and nothing rises.
  - The first marks count in full, later ones a quarter: a path that has no rate yet has no history either.
  - While marks come, what is added is the same for all, a twentieth of an equal share: that makes shares equal.

- **Round trips** that the peers' kernels reflect, against a target of 8 ms as in Swift (SIGCOMM'20, section 3.1): above
  it a rate falls in proportion to what is too much, below it the rate rises by a tenth. Departures:

  - A fall takes three long round trips: hosts that share cores make single ones without any queue.
  - One round trip is in flight at a time, so a fall is never repeated for packets that were queued before it, and
    nothing is lowered while round trips do not rise: the queue drains already.
  - There is a pause between two raises, or short round trips would make it an explosion.

No rate falls below half of an equal share of the link. TCP without ECN fills a queue, deep or not, whatever others do:
it marks all their packets, and makes their round trips long. A sender that went on slowing down would be gone. Where
no rank knows the speed and no socket has been full, that is a share of 1 Gbit/s: a floor by the 20 Gbit/s that paths
begin at would be no congestion control on slow links.

Loss lowers no rate: what a shallow queue drops is requested again while its flow runs (clock-23), and receivers that
told senders to slow down for it made nothing shorter (docs/tried.md). A rate whose echoes stay away for good rises
again.
"""

from __future__ import annotations

from collections.abc import Collection

from tailbound.transport.sockets import burst_packets
from tailbound.wire.packets import record_of
from tailbound.wire.schema import LINK, PATH

_SECOND = 1_000_000_000
#: Rates that differ by more than this are those of different links, not of one queue.
_UNEVEN = 2.0
#: Bytes per second below which a driver is not believed about rates and bursts: old tun devices say 10 Mbit/s.
_BELIEVED = 1.25e7
#: Bytes per second of a link of which no rank says how fast it is.
_SPEED = 2.5e9
#: The same for the least that rates fall to, and for answers: most links have as much.
UNKNOWN = 1.25e8
#: Of a link; ``LINK`` says what each is. With twice as much ``ahead`` senders slowed down before their own queue, half
#: as much wakes them up twice as often. ``late``: else the link would idle for as long as a thread waits for a core.
_LIMITS = {"quantum": 500_000, "ahead": 2_000_000, "late": 8_000_000}

_Path, _Link = record_of(PATH), record_of(LINK)


class Pacer:
    """Rates of all destinations, as the library keeps them.

    Args:
        ranks: destinations.
        gap: ns from one burst to the next, whomever they are for; 0: none. For receivers with room for few bursts.
        speed: bytes per second of the link, where every path begins; 0: no rank knows. Its driver may be wrong.
        most: bytes per second that all ranks together never exceed, as the user says; 0: the link itself sees to it.
        room: bytes that may wait in this host's own sockets and queues.

    Attributes:
        table, paths: rates and round trips, by rank.
        link: that all share.
        stated: its speed at the beginning. What left while sockets were full is less on a busy host, too.
    """

    def __init__(
        self, ranks: Collection[int], gap: int = 0, speed: float = 0.0, most: float = 0.0, room: int = 1 << 62
    ) -> None:
        self.table = (_Path * (1 + max(ranks, default=0)))()
        self.paths = {rank: self.table[rank] for rank in ranks}
        known = speed if most or speed >= _BELIEVED else 0.0
        self.stated = known or _SPEED
        self.link = _Link(
            most=most, speed=self.stated, floor=known or UNKNOWN, gap=gap, room=room, known=known, own=speed,
            peers=max(1, len(self.paths)), **_LIMITS,
        )  # fmt: skip

    def hold_to(self, rank: int, rate: float) -> None:
        """``rank`` is sent to no faster than ``rate`` bytes per second, as if round trips had said so."""
        self.paths[rank].rate, self.paths[rank].limited = rate, 1

    def rate(self, rank: int) -> float:
        """Bytes per second towards ``rank``."""
        path, speed = self.paths[rank], self.link.speed
        return float(min(path.rate, speed) if path.limited else speed)

    def largest(self, stride: int) -> int:
        """Packets of ``stride`` bytes in a burst at most: what GSO takes, and a quantum's worth at the link's speed."""
        return max(1, min(burst_packets(stride), int(self.stated * self.link.quantum / _SECOND / stride)))

    def even(self, ranks: Collection[int]) -> bool:
        """Whether no rank among ``ranks`` is more than ``_UNEVEN`` times slower than another."""
        rates = [self.rate(rank) for rank in ranks]
        return max(rates, default=0.0) <= _UNEVEN * min(rates, default=0.0)
