"""How fast to send to each rank: by marks, and by round trips (clock-24).

Pure state with the time passed in. A path begins at the speed of the link. Where the user says how fast that is, all
ranks together are sent to no faster, from the first row on: a virtual machine's interface takes more than its host
lets through, and what waits in this host's own queues is no queue of the network, though a round trip cannot tell: no
more lies there, as a rule, than leaves within ``t_low``. What a driver says is no such bound: a container's interface
says 10 Gbit/s whatever it takes. Two things lower the rate of a path:

- **Marks** (CE, RFC 3168), the share of the packets between two probes that came with one: DCTCP (SIGCOMM'10, section
  3.1), with a rate in place of a window. Departures from the paper, each because of what is here:

  - Once an echo and not once a round trip; there is one probe on the way, so these are the same.
  - Marks do not replace round trips: an echo with marks counts for both, the lower rate holds, and nothing rises.
  - The first mark counts in full: a path that has no rate yet has no history either.
  - Marks never take a rate below half of an equal share of the link. Whoever fills a queue without heeding marks (TCP
    without ECN) marks all packets of others; a sender that went on halving would be gone.
  - While marks come, what is added is the same for all, which is what makes shares equal.

- **Round trips** that the peers' kernels reflect, against a target as in Swift (SIGCOMM'20, section 3.1): above it a
  rate falls in proportion to what is too much, below it the rate rises. Departures:

  - The first limit is what drained: bytes on the way divided by the round trip. It takes three long round trips, and a
    fall takes two: hosts that share cores make single ones without any queue.
  - One round trip is in flight at a time, so a fall is never repeated for packets that were queued before it, and
    nothing is lowered while round trips do not rise: the queue drains already.
  - The addend is a part of the rate and a little, so that a link that comes back is used within tens of ops; and there
    is a pause between two raises, or short round trips would make it an explosion.

Loss lowers no rate: what a shallow queue drops is requested again while its flow runs (clock-23), and receivers that
told senders to slow down for it made nothing shorter (docs/tried.md). A rate whose echoes stay away for good rises
again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tailbound.transport.sockets import burst_packets
from tailbound.wire.packets import record_of
from tailbound.wire.schema import LINK, MAX_RANKS, PATH

_SECOND = 1_000_000_000
#: Rates that differ by more than this are those of different links, not of one queue.
_UNEVEN = 2.0
#: Speeds of a link that differ by less are the same.
_MOVED = 0.1
#: Probes lost running after which a rate rises: so long there is nothing to go by.
_SILENT = 8


@dataclass(frozen=True)
class PaceConfig:
    """Settings of the control of a rate; times in ns, rates in bytes per second.

    Attributes:
        t_low: round trips below this say that there is no queue.
        t_high: the target; round trips above it are never accepted.
        beta: multiplicative decrease.
        addend, step: part of the rate, and bytes per second, that are added.
        pause: ns between two raises.
        sure: long round trips running that make a first limit (two make a decrease).
        first: no first limit is lower: what little was sent says nothing about the path.
        floor: no rate is lower, or than half of an equal share of the link if that is less.
        speed: of a link of which no rank says how fast it is.
        quantum: ns of sending that may leave at once.
        ahead: ns of sending at the link's speed, for all ranks together, that may lie in this host's own queues. Twice
            as much made senders slow down before their own queue (docs/simulate.md); half as much wakes them up twice
            as often.
        late: the same where rows had to wait and this host's processors were busy when they might have left: else
            the link would idle for as long as a thread waits for a core.
        weight: of a new share of marked packets in the smoothed one (DCTCP's g).
        share: of an equal part of the link, that is added while marks come; marks take no rate below half of that part.
        marked: smoothed share of marked packets above which marks count as coming.
    """

    t_low: int = 2_000_000
    t_high: int = 8_000_000
    beta: float = 0.8
    addend: float = 0.1
    step: float = 2.5e5
    pause: int = 4_000_000
    sure: int = 3
    first: float = 1.5e8
    floor: float = 1e6
    speed: float = 2.5e9
    quantum: int = 500_000
    ahead: int = 2_000_000
    late: int = 8_000_000
    weight: float = 0.25
    share: float = 0.05
    marked: float = 0.01


class Path:
    """Rate towards one rank.

    Args:
        limits: settings.
        speed: of the link, where the rate begins; never more.
        peers: ranks that share it.

    Attributes:
        rate: bytes per second.
        free: the rate is no limit. One that equals the speed may be one: the link may turn out to be faster.
        peers: as above.
        rtt: the last round trip in ns; 0: none yet.
        marked: smoothed share of packets that came with CE.
        slowed: how often marks have lowered the rate.
    """

    def __init__(self, limits: PaceConfig, speed: float, peers: int = 1) -> None:
        self._limits = limits
        self.speed, self.peers = speed, max(1, peers)
        self.rate = speed
        self.free = True
        self.rtt = 0
        self.marked = 0.0
        self.slowed = 0
        self._long = 0
        self._raised = 0
        self._fresh = True  # round trips have made no first limit since it was free

    @property
    def least(self) -> float:
        """Half of an equal share of the link: marks take no rate below that."""
        return self.speed / self.peers / 2

    @property
    def floor(self) -> float:
        """No rate is lower."""
        return min(self._limits.floor, self.least)

    @property
    def limited(self) -> bool:
        """Whether it may not be sent to as fast as the link is."""
        return not self.free

    def follow(self, speed: float) -> None:
        """The link has this speed now, in bytes per second."""
        self.rate = speed if self.free else min(self.rate, speed)
        self.speed = speed

    def echoed(self, rtt: int, sent: int, marked: float, now: int, whole: int = 0) -> None:
        """Takes one echo.

        Args:
            rtt: its round trip, ns, without what it waited in this host's own queues.
            sent: bytes that left for this rank between this probe and the one before.
            marked: share of their packets that came with CE.
            now: ns.
            whole: its round trip with that: in so long the bytes have drained; 0: it did not wait.
        """
        limits, before = self._limits, self.rtt
        self.rtt = rtt
        self._long = self._long + 1 if rtt > limits.t_high else 0
        drained = sent * _SECOND / max(rtt, whole)
        free, rate = self.free, self.rate
        at_once = free and self.marked < limits.marked
        self.marked += (1.0 if marked and at_once else limits.weight) * (marked - self.marked)
        self._time(before, drained, marked, now)
        if marked:
            if free and rtt > limits.t_low:  # shorter ones measure the burst, not the path
                rate = min(rate, max(self._first, drained))
            lower = min(self.rate, max(self.least, rate * (1 - self.marked / 2)))
            self.slowed += lower < self.rate
            self._set(lower)
            self.free = False
            self._raised = now

    def _time(self, before: int, drained: float, marked: float, now: int) -> None:
        """What the round trip says, with the one ``before``, while ``drained`` bytes per second left."""
        limits, rtt = self._limits, self.rtt
        if self._fresh and self._long >= limits.sure:
            self._set(min(self.rate, max(self._first, drained)))
            self.free = self._fresh = False
            self._raised = now
        elif self.free:
            return
        elif rtt <= limits.t_high and not marked:
            self._raise(now)
        elif self._long >= 2 and rtt >= before:
            self._set(self.rate * (1 - limits.beta * (1 - limits.t_high / rtt)))

    def unheard(self, now: int) -> None:
        """Echoes have stayed away for long: nothing says that the rate is right."""
        if not self.free:
            self.marked = 0.0
            self._raise(now)

    @property
    def _first(self) -> float:
        """No first limit is lower."""
        return min(self._limits.first, self.speed / 2)

    def _raise(self, now: int) -> None:
        limits = self._limits
        if now - self._raised < limits.pause:
            return
        self._raised = now
        marked = self.marked > limits.marked
        more = limits.share * self.speed / self.peers if marked else limits.addend * self.rate + limits.step
        self._set(self.rate + more)

    def _set(self, rate: float) -> None:
        """Sets the rate; one above the speed is no limit any more."""
        if rate > self.speed:
            self.free = self._fresh = True
        self.rate = min(self.speed, max(self.floor, rate))


_Path, _Link = record_of(PATH), record_of(LINK)


class Pacer:
    """Rates of all destinations. The library spends them, burst by burst (``host_lib/core/send.c``).

    Args:
        ranks: destinations.
        limits: settings.
        gap: ns from one burst to the next, whomever they are for; 0: none. For receivers with room for few bursts.
        speed: bytes per second of the link, where every path begins; 0: no rank knows, so that paths begin at
            ``limits.speed``.
        most: bytes per second that all ranks together never exceed; 0: the link itself sees to it.
        room: bytes that may wait in this host's own sockets and queues.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        limits: PaceConfig | None = None,
        gap: int = 0,
        speed: float = 0.0,
        most: float = 0.0,
        room: int = 1 << 62,
    ) -> None:
        self.limits = limits = limits or PaceConfig()
        ranks = list(ranks)
        self._speed = self._stated = speed = speed or limits.speed
        self.paths = {rank: Path(limits, speed, len(ranks)) for rank in ranks}
        #: what the library reads, and keeps its accounts in: rates by rank, and the link that all share
        self.rates = (_Path * MAX_RANKS)()
        self.link = _Link(
            most=most, speed=speed, gap=gap, quantum=limits.quantum, ahead=limits.ahead, late=limits.late,
            room=min(room, 1 << 62),
        )  # fmt: skip
        #: ranks that may not be sent to as fast as the link is; empty as a rule
        self.limited: set[int] = set()
        for rank in ranks:
            self._note(rank)

    def echoed(self, rank: int, rtt: int, sent: int, marked: float, now: int, whole: int = 0) -> None:
        """An echo of ``rank``; see ``Path.echoed``."""
        self.paths[rank].echoed(rtt, sent, marked, now, whole)
        self._note(rank)

    def follow(self, speed: float) -> None:
        """The link turned out to have this speed, in bytes per second; 0: no rank knows."""
        speed = speed or self.limits.speed
        if abs(speed - self._speed) <= _MOVED * self._speed:
            return
        self._speed = speed
        self.link.speed = speed
        for rank, path in self.paths.items():
            path.follow(speed)
            self._note(rank)

    def among(self, peers: int) -> None:
        """So many ranks share the link now."""
        for path in self.paths.values():
            path.peers = max(1, peers)

    def unheard(self, rank: int, lost: int, now: int) -> None:
        """``lost`` probes to ``rank`` running have brought no echo."""
        if lost >= _SILENT:
            self.paths[rank].unheard(now)
            self._note(rank)

    def hold_to(self, rank: int, rate: float) -> None:
        """``rank`` is sent to no faster than ``rate`` bytes per second, as if round trips had said so."""
        self.paths[rank].rate = self.rates[rank].rate = rate
        self.rates[rank].limited = 1
        self.limited.add(rank)

    def _note(self, rank: int) -> None:
        path, told = self.paths[rank], self.rates[rank]
        told.rate, told.limited = path.rate, path.limited
        if path.limited:
            self.limited.add(rank)
        else:
            self.limited.discard(rank)

    def rate(self, rank: int) -> float:
        """Bytes per second towards ``rank``."""
        return self.paths[rank].rate

    def limit(self, rank: int) -> float:
        """Bytes per second towards ``rank``; 0: as fast as the link is."""
        return self.rate(rank) if rank in self.limited else 0.0

    def largest(self, stride: int) -> int:
        """Packets of ``stride`` bytes in a burst at most: what GSO takes, and a quantum's worth at the link's speed.

        That is the speed at which paths begin: what left while sockets were full is less on a busy host, too.
        """
        return max(1, min(burst_packets(stride), int(self._stated * self.limits.quantum / _SECOND / stride)))

    def even(self, ranks: Collection[int]) -> bool:
        """Whether no rank among ``ranks`` is more than ``_UNEVEN`` times slower than another."""
        if self.limited.isdisjoint(ranks):
            return True
        rates = [self.rate(rank) for rank in ranks]
        return max(rates) <= _UNEVEN * min(rates)

    def holds(self, room: int) -> None:
        """So many bytes may wait in this host's own sockets and queues from now on."""
        self.link.room = room

    def waits(self, now: int) -> int:
        """ns that what is handed over now waits in this host's own queues, by the speed of its link."""
        return max(0, int(self.link.leaves) - now)
