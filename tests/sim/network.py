"""Simulated time, and NICs with a queue in each direction: bursts of rows leave one after the other, and arrive so.

Senders hold back what a receiver's link cannot take (as pacing by round-trip time does), send results before
contributions (clock-17) and drop rows past their op's time. Everything is seeded.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

US, MS, S = 1_000, 1_000_000, 1_000_000_000
#: Bytes per ns of a link: 10 Gb/s.
RATE = 1.25
LATENCY = 25 * US
#: A receiver's backlog from which on senders hold back.
STANDING = 2 * MS


@dataclass
class Packets:
    """A burst of rows of one flow, or one control packet (``rows`` 0)."""

    kind: str  # contribution, result, ready, hold, unhold, ask, gone, repair, answer (results), again (contributions)
    sender: int
    to: int
    label: int
    tag: int = 0
    rows: int = 0
    of: int = 0  #: rows of the whole flow
    size: int = 128  #: bytes
    last: bool = False
    until: int = 1 << 62
    abstain: bool = False
    late: bool = False  #: in place of rows that nobody would take
    contributed: int = 0
    published: int = 0
    newest: int = 0
    deadline: int = 0
    places: int = 0
    first: bool = False  #: asks for contributions, not for results
    done: Callable[[], None] | None = None
    over: Callable[[], bool] | None = None  #: whether the receiver takes no more of it


class World:
    """Clock, event queue, links, and the dice."""

    def __init__(self, ranks: int, seed: int = 1, loss: float = 0.0) -> None:
        self.ranks, self.loss = ranks, loss
        self.random = random.Random(seed)
        self.now = S
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self.speed = [1.0] * ranks  # share of RATE, both ways
        self.in_free = [0] * ranks
        self.links = [Link(self, r) for r in range(ranks)]
        self.deliver: Callable[[Packets, int, bool], None] = lambda *_: None

    def at(self, when: int, what: Callable[[], None]) -> None:
        """Calls ``what`` at ``when`` (ns)."""
        self._count += 1
        heapq.heappush(self._events, (max(when, self.now), self._count, what))

    def run(self, over: Callable[[], bool], most: int) -> None:
        """Runs until ``over()`` or for ``most`` ns."""
        end = self.now + most
        while self._events and not over():
            when, _, what = heapq.heappop(self._events)
            if when > end:
                raise TimeoutError(f"not over after {most / S:g} simulated seconds")
            self.now = when
            what()

    def lost(self, rows: int) -> int:
        """How many of ``rows`` get lost."""
        if not self.loss or not rows:
            return 0
        mean = rows * self.loss
        if rows == 1:
            return int(self.random.random() < self.loss)
        spread = (mean * (1 - self.loss)) ** 0.5
        return min(rows, max(0, round(self.random.gauss(mean, spread))))


@dataclass
class Link:
    """The way out of one rank: one burst at a time."""

    world: World
    rank: int
    busy: bool = False
    dead: bool = False
    stale: int = 0
    results: deque[Packets] = field(default_factory=deque)
    flows: dict[int, deque[Packets]] = field(default_factory=dict)  # contributions by destination
    _turn: int = 0
    _stamp: Callable[[Packets], None] | None = None

    def submit(self, packets: Packets) -> None:
        """Queues a burst."""
        if packets.kind == "contribution":
            self.flows.setdefault(packets.to, deque()).append(packets)
        else:
            self.results.append(packets)
        self.pump()

    def control(self, packets: Packets) -> None:
        """Sends a control packet past the queue."""
        world = self.world
        if not self.dead:
            lost = world.random.random() < world.loss
            world.at(world.now + LATENCY, lambda: None if lost else world.deliver(packets, 0, False))

    def pump(self) -> None:
        """Sends the next burst if the link is free."""
        world = self.world
        if self.busy or self.dead:
            return
        one, again = self._next(world.now)
        if one is None:
            if again:
                self.busy = True
                world.at(again, self._free)
            return
        self.busy = True
        out = int(one.size / (RATE * world.speed[self.rank]))
        world.at(world.now + out, lambda: self._left(one))

    def _free(self) -> None:
        self.busy = False
        self.pump()

    def _left(self, one: Packets) -> None:
        world = self.world
        self.busy = False
        if self.dead:
            return
        if self._stamp is not None:
            self._stamp(one)
        inward = int(one.size / (RATE * world.speed[one.to]))
        world.in_free[one.to] = max(world.now + LATENCY, world.in_free[one.to]) + inward
        lost = world.lost(one.rows)
        last = one.last and world.random.random() >= world.loss
        world.at(world.in_free[one.to], lambda: world.deliver(one, one.rows - lost, last))
        if one.done is not None:
            one.done()
        self.pump()

    def _next(self, now: int) -> tuple[Packets | None, int]:
        world, again = self.world, 0
        for _ in range(len(self.results)):
            one = self.results[0]
            if one.until < now:
                self.results.popleft()
                self._drop(one)
            elif world.in_free[one.to] - now < STANDING:
                self.results.popleft()
                return one, 0
            else:
                free = world.in_free[one.to] - STANDING + 1
                again = min(again or free, free)
                self.results.rotate(-1)
        peers = [(self.rank + 1 + (self._turn + i) % (world.ranks - 1)) % world.ranks for i in range(world.ranks - 1)]
        for place, to in enumerate(peers):
            queue = self.flows.get(to)
            while queue and (queue[0].until < now or (queue[0].over is not None and queue[0].over())):
                self._drop(queue.popleft())
            if not queue:
                continue
            if world.in_free[to] - now < STANDING:
                self._turn += place + 1
                return queue.popleft(), 0
            free = world.in_free[to] - STANDING + 1
            again = min(again or free, free)
        return None, again

    def _drop(self, one: Packets) -> None:
        self.stale += one.rows
        if one.done is not None:
            one.done()
