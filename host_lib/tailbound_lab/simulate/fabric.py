"""A network in virtual time for real packets: links with rates and finite queues, losses, cuts, one heap of events.

A burst is what one message of ``sendmmsg`` carries: packets of one length for one rank. It leaves its sender's link at
the link's rate, waits in the queue before the receiver's link, and is dropped there as a whole if there is no room, as
a switch drops a super-frame. Losses hit single packets, or, in bursts (Gilbert and Elliott), whatever passes.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

US, MS, S = 1_000, 1_000_000, 1_000_000_000
#: Silence that ends a burst of losses, as in the lab: else a lone packet might be lost for ever.
_BAD_MOST = 100 * MS
#: By how much a packet is late that others pass.
_LATE = 1 * MS


@dataclass(slots=True)
class Burst:
    """Packets of ``stride`` bytes (the last may be shorter) between ranks of a job; all marked (CE) or none."""

    source: int
    to: int
    data: bytes
    stride: int
    job: int = 0
    marked: bool = False

    @property
    def count(self) -> int:
        """How many packets."""
        return -(-len(self.data) // self.stride)

    def packets(self) -> list[bytes]:
        """Its packets."""
        return [self.data[at : at + self.stride] for at in range(0, len(self.data), self.stride)]


@dataclass(frozen=True)
class Terms:
    """What the network is like.

    Attributes:
        rate: bytes per second of every rank's link, each way.
        queue: bytes that wait before a receiver's link at most.
        room: bytes that wait in a sender's sockets at most; then they are full.
        latency, jitter: ns; the jitter is uniform from 0 on and does not reorder what goes from one rank to another.
        loss: probability with which a packet is lost.
        burst: mean length in packets of losses in bursts; 0: each by itself.
    """

    rate: float = 1.25e8
    queue: int = 3 << 20
    room: int = 1 << 20
    latency: int = 25 * US
    jitter: int = 20 * US
    loss: float = 0.0
    burst: float = 0.0


class _Pipe:
    """One direction of a link: bursts leave one after the other, each at the speed that the link has when it begins."""

    def __init__(self, fabric: Fabric, end: _End) -> None:
        self._fabric, self._end = fabric, end
        self._waiting: deque[tuple[Burst, Callable[[Burst], None]]] = deque()
        self._since, self._until = 0, 0  # of the burst that is leaving
        self._bytes = 0  # of those behind it

    def push(self, burst: Burst, left: Callable[[Burst], None]) -> None:
        """Queues a burst; ``left`` gets it when its last byte has left."""
        self._waiting.append((burst, left))
        self._bytes += len(burst.data)
        if len(self._waiting) == 1:
            self._begin()

    def _begin(self) -> None:
        fabric, (burst, left) = self._fabric, self._waiting[0]
        self._bytes -= len(burst.data)
        self._since = fabric.clock
        self._until = self._since + int(len(burst.data) * S / (fabric.terms.rate * self._end.speed))

        def over() -> None:
            self._waiting.popleft()
            left(burst)
            if self._waiting:
                self._begin()

        fabric.at(self._until, over)

    @property
    def backlog(self) -> int:
        """Bytes that have not left yet."""
        if not self._waiting:
            return 0
        now, size = self._fabric.clock, len(self._waiting[0][0].data)
        share = (self._until - now) / max(1, self._until - self._since)
        return self._bytes + int(size * min(1.0, max(0.0, share)))

    def falls_below(self, most: int) -> int:
        """When the backlog may be less than ``most`` bytes: while the burst that leaves now does so, or after it."""
        now = self._fabric.clock
        if not self._waiting:
            return now
        excess = self._bytes + len(self._waiting[0][0].data) - most
        left = self._since + excess * (self._until - self._since) // len(self._waiting[0][0].data)
        return max(now, min(self._until, left)) + 1 * US


class _End:
    """One rank's link: both directions, the speed it has, whether it is cut, and what befalls its packets.

    Attributes:
        loss: probability with which one that it sends is lost, besides the network's.
        twice, late: with which one from or to it comes twice, and behind those of the next ``_LATE`` ns.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.speed, self.cut = 1.0, False
        self.loss = self.twice = self.late = 0.0
        self.out, self.into = _Pipe(fabric, self), _Pipe(fabric, self)
        self.losing = False  # in the bad state of its losses
        self.heard = 0  # when something passed last
        self.last: dict[int, int] = {}  # when the last burst for each rank arrives


class Fabric:
    """Clock, heap of events, and links of ``ranks``; ``seed`` is that of all dice.

    Attributes:
        now: when the present event happens, ns; begins at one second.
        spent: ns that whoever works in this event has worked since.
        dropped: packets that did not arrive, by why: ``loss``, ``queue``, ``cut``.
    """

    def __init__(self, ranks: int, seed: int, terms: Terms | None = None) -> None:
        self.terms = terms or Terms()
        self.now = S
        self.spent = 0
        self.random = random.Random(f"fabric {seed}")
        self.ends = [_End(self) for _ in range(ranks)]
        self.deliver: Callable[[Burst], None] = lambda burst: None
        self.dropped: Counter[str] = Counter()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: int, what: Callable[[], None]) -> None:
        """Calls ``what`` at ``when``, ns; what is to happen at the same time happens in the order of the calls."""
        self._count += 1
        heapq.heappush(self._events, (when if when > self.now else self.now, self._count, what))

    def run(self, over: Callable[[], bool], most: int) -> None:
        """Runs until ``over()``.

        Raises:
            TimeoutError: it is not after ``most`` ns, or nothing happens any more.
        """
        end = self.now + most
        while not over():
            if not self._events or self._events[0][0] > end:
                raise TimeoutError(f"not over after {(self.now - end + most) / S:g} simulated seconds")
            self.now, _, what = heapq.heappop(self._events)
            self.spent = 0
            what()

    @property
    def clock(self) -> int:
        """What a clock shows to whoever works in this event, ns."""
        return self.now + self.spent

    def has_room(self, rank: int, job: int = 0) -> bool:
        """Whether the sockets of ``rank`` of a job take another burst."""
        return self.ends[rank].out.backlog < self.terms.room

    def room_at(self, rank: int, job: int = 0) -> int:
        """When the sockets of ``rank`` of a job may take another burst, ns; to be asked again then."""
        return self.ends[rank].out.falls_below(self.terms.room)

    def send(self, burst: Burst) -> None:
        """Takes over a burst; ``deliver`` gets what arrives of it."""
        self.ends[burst.source].out.push(burst, self._travel)

    def _travel(self, burst: Burst) -> None:
        """Between the links: nothing that one rank sends another is passed by what it sends later."""
        end, terms = self.ends[burst.source], self.terms
        arrives = self.now + terms.latency + self.random.randrange(terms.jitter + 1)
        arrives = end.last[burst.to] = max(arrives, end.last.get(burst.to, 0))
        self.at(arrives, lambda: self._enter(burst))

    def _enter(self, burst: Burst) -> None:
        """At the queue before the receiver's link."""
        end = self.ends[burst.to]
        if end.cut or self.ends[burst.source].cut:
            self.dropped["cut"] += burst.count
        elif end.into.backlog + len(burst.data) > self.terms.queue:
            self.dropped["queue"] += burst.count
        else:
            end.into.push(burst, self._arrive)

    def _arrive(self, burst: Burst) -> None:
        ends = self.ends[burst.source], self.ends[burst.to]
        if not self.terms.loss and not any(end.loss or end.twice or end.late for end in ends):
            self.deliver(burst)
            return
        packets = burst.packets()
        kept = [packet for packet in packets if not self._loses(ends[1]) and not self._happens(ends[0].loss)]
        self.dropped["loss"] += len(packets) - len(kept)
        twice, late = (max(getattr(end, name) for end in ends) for name in ("twice", "late"))
        if twice:
            kept += [packet for packet in kept if self._happens(twice)]
        if late:
            for packet in [packet for packet in kept if self._happens(late)]:
                kept.remove(packet)
                again = Burst(burst.source, burst.to, packet, len(packet))
                self.at(self.now + _LATE, lambda again=again: self.deliver(again))  # type: ignore[misc]
        if kept:
            self.deliver(Burst(burst.source, burst.to, b"".join(kept), burst.stride))

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def _loses(self, end: _End) -> bool:
        terms = self.terms
        if not terms.burst:
            return self.random.random() < terms.loss
        if self.now - end.heard > _BAD_MOST:
            end.losing = False
        end.heard = self.now
        leave = 1 / terms.burst if end.losing else terms.loss / (terms.burst * (1 - terms.loss))
        if self.random.random() < leave:
            end.losing = not end.losing
        return end.losing
