"""What waits to be sent: op by op, nothing that is stale, never a sleep (clock-17).

The transport thread submits runs of packets and pumps once a turn. As a rule everything leaves within ``submit``: the
queue holds what a full socket or a rate (``pace``) keeps back. Per destination the order
of submission is kept within results and within contributions, since the last packet of a run says that all before it
has been sent.

Results go before the contributions of later ops, and behind those of their own: an owner that has its sums early would
otherwise keep the others' sums waiting for as long as its own results take to send. Rows that were asked for again go
first: they are few, a rank waits for them who does so for a few milliseconds only, and their flow has ended.

Rows for everybody may leave once, over a shared channel (``sender.Shared``): they wait for what is older for any of its
ranks, leave at the rate of the slowest, and are paid for and counted by rank.

A row is stale when its time is up (``until``) or when no rank takes it any more (``over``); it is dropped and counted.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tailbound.transport.batch import (
    ALLOWED,
    ANY,
    BATCH,
    NEXT,
    RANK,
    SIZE,
    TOTAL,
    Batch,
    flows_of,
)
from tailbound.transport.pace import Pacer
from tailbound.transport.probe import Prober
from tailbound.transport.sender import FULL, NO_GSO, Sender
from tailbound.wire.schema import MAX_RANKS, PacketType, serial_distance

#: (rank, u8[count, stride]): packets for one rank, or the number of a shared channel, headers finished.
Run = tuple[int, NDArray[np.uint8]]

#: A pump hands over this many bursts at most before the loop looks around again (8 MiB: about 10 ms).
_BURSTS = 128
#: Bursts in one system call where several sockets take turns: a quarter of a megabyte. Calls of a run take the source
#: ports of its peer in turn, so rows are handed over in the order of one socket: the last packet, whose mark says that
#: nothing more comes, follows all others, and a tail that is cut off is one piece.
_TURN = 4
#: So many bytes must have left while sockets were full to say how fast the link is; and after so long (ns) they do.
_MEASURED_BYTES, _MEASURED = 256 << 10, 20_000_000
#: ns until a full device queue is tried again; it makes no socket event.
_RETRY = 500_000
#: ns until a full socket is tried again at the latest; as a rule it becomes writable before.
_ROOM = 5_000_000


class _Item:
    """One submission."""

    __slots__ = (
        "channels", "constrained", "done", "flows", "kind", "label", "left", "memory", "over", "packets", "shared",
        "stride", "until",
    )  # fmt: skip

    def __init__(
        self,
        label: int,
        kind: PacketType,
        runs: Sequence[Run],
        until: int,
        done: Callable[[int], None] | None,
        over: Callable[[int], bool] | None,
        channels: Mapping[int, int],
        pacer: Pacer,
    ) -> None:
        self.label, self.kind, self.until, self.done, self.over = label, kind, until, done, over
        self.memory: list[Run] = []
        self.channels: list[int] = []
        self.shared: list[int] = []
        self.left = 0
        for run in runs:
            rank, packets = run
            if not len(packets):
                continue
            self.memory.append(run)
            self.left += len(packets)
            if channels[rank] not in self.channels:
                self.channels.append(channels[rank])
            if rank >= MAX_RANKS:
                self.shared.append(rank)
        self.stride = self.memory[0][1].shape[1] if self.memory else 0
        self.flows = flows_of(self.memory, pacer.largest(self.stride) if self.memory else 1, channels)
        self.packets = 0  # handed to the kernel; copies count
        self.constrained = False  # the flows' burst sizes and permissions are not the free ones


class SendQueue:
    """The send queue of one rank; all calls from one thread.

    Args:
        sender: sockets, addresses and counters.
        pacer: rates by rank.
        prober: sends probes behind bursts and feeds ``pacer``; None: no round trips, no limits.
        clock: CLOCK_MONOTONIC in ns, for ``drained``.

    Attributes:
        stale: rows dropped because their time was up or no rank takes them any more.
        waits: times a socket or a device queue was full.
        held: times a rate kept something back.
        drained: bytes per second that left while sockets were full, lately, which is what the link takes; 0: none has
            been full yet.
        full: sockets (by index) that had no room; they become writable when there is some again.
        again: when to pump again, ns; 0: nothing waits, or for a writable socket.
    """

    def __init__(
        self,
        sender: Sender,
        pacer: Pacer | None = None,
        prober: Prober | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._sender = sender
        self.pacer = pacer or Pacer(sender.peers)
        self.prober = prober
        self.stale = self.waits = self.held = 0
        self.drained = 0.0
        self._clock = clock
        self._bytes = 0  # that have left
        self._crowded: tuple[int, int] | None = None  # since when sockets are full, and bytes that had left by then
        self.full: set[int] = set()
        self._blocked: set[int] = set()  # sockets that are not to be tried again in this pump
        self._turns: dict[int, int] = {}  # which of its sockets a channel has come to
        # results, contributions, and rows that were asked for again
        self._queues: tuple[deque[_Item], deque[_Item], deque[_Item]] = (deque(), deque(), deque())
        self._batch: Batch | None = None
        self.again = 0
        self._refused: tuple[int, int] | None = None
        self._pumping = False

    def warm_up(self) -> None:
        """Makes what takes long at its first use: compiled code, above all."""
        one = flows_of([(0, np.zeros((1, 64), np.uint8))], 1, {0: 0})
        batch = self._batches()
        batch.fill(one, 64, most=0)
        batch.settle(one, 0)

    def submit(
        self,
        label: int,
        kind: PacketType,
        runs: Sequence[Run],
        until: int,
        done: Callable[[int], None] | None,
        now: int,
        over: Callable[[int], bool] | None = None,
        *,
        again: bool = False,
    ) -> None:
        """Takes over packets, which must not change until ``done`` or ``cancel``, and sends what can be sent now.

        Args:
            label: op.
            kind: CONTRIBUTION, or what is like a result.
            runs: may be empty: ``done`` then still waits for its turn among those of its kind.
            until: CLOCK_MONOTONIC in ns; what has not left by then is stale.
            done: called once, in the order of submission of its kind, with the number of packets that left (those over
                a shared channel once for every rank).
            now: CLOCK_MONOTONIC in ns.
            over: asked about a rank before rows that had to wait are sent: whether that rank has no use for them now.
            again: the rank has asked for them, which have left once: they wait for nothing else.
        """
        item = _Item(label, kind, runs, until, done, over, self._sender.channel, self.pacer)
        self._queues[2 if again else kind == PacketType.CONTRIBUTION].append(item)
        self.pump(now, fresh=item)

    def cancel(self, label: int) -> int:
        """Drops what is still queued for op ``label``, whose memory is about to be used again; returns the rows."""
        dropped = 0
        for queue in self._queues:
            for item in queue:
                if item.label == label and item.left:
                    dropped += item.left
                    self._drop(item, range(len(item.flows)))
        if dropped:
            self._finish()
        return dropped

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not (any(self._queues) or self._sender.deferred)

    @property
    def submissions(self) -> int:
        """Submissions that are not over."""
        return sum(map(len, self._queues))

    @property
    def packets(self) -> int:
        """Packets that wait."""
        return sum(item.left for queue in self._queues for item in list(queue))  # which another thread may ask for

    def pump(self, now: int, fresh: _Item | None = None) -> None:
        """Sends what may leave now."""
        if self.prober is not None and self.prober.waits:
            for echo in self.prober.collect(now):
                self.pacer.echoed(echo.peer, echo.rtt, echo.sent, echo.marked, now, echo.whole)
        if self._pumping:  # a callback of ours has submitted more
            self._pump_at(now)
            return
        self.full.clear()
        self.again = 0
        self._pumping = True
        self._blocked.clear()
        try:
            if not self._sender.flush():
                self._block(0, errno.EAGAIN, now)
            self._round(now, fresh)
            self._finish()
            self._measure()
        finally:
            self._pumping = False
        if self.empty:
            self.again = 0
            self.full.clear()  # another socket of the channel has taken what these had no room for

    def _measure(self) -> None:
        """Follows how much leaves from when sockets are full until they are not, or for long enough."""
        if self._crowded is None:
            if self._blocked:
                self._crowded = self._clock(), self._bytes
            return
        (since, before), now = self._crowded, self._clock()
        if self._blocked and now - since < _MEASURED:
            return
        if self._bytes - before >= _MEASURED_BYTES:
            found = (self._bytes - before) * 1e9 / max(1, now - since)
            self.drained += (found - self.drained) / 4 if self.drained else found
        self._crowded = (now, self._bytes) if self._blocked else None

    def _round(self, now: int, fresh: _Item | None) -> None:
        budget = _BURSTS
        behind: set[int] = set()  # ranks for which something older waits
        for item in self._in_order(fresh):
            if item is not fresh:
                self._expire(item, now)
            if item.left:
                budget = self._drain(item, budget, behind, now)
            if item.left:
                if budget <= 0:
                    self._pump_at(now)
                    return
                for flow in item.flows:
                    if flow[NEXT] < flow[TOTAL]:
                        behind.update(self._sender.ranks_of(int(flow[RANK])))
                if len(behind) == len(self._sender.peers):
                    return

    def _in_order(self, fresh: _Item | None) -> Sequence[_Item]:
        """Everything that waits, in the order in which it may leave; ``fresh`` has just come."""
        results, contributions, again = self._queues
        if fresh is not None and len(results) + len(contributions) + len(again) == 1:
            return (fresh,)
        if not (results and contributions):
            return [*again, *results, *contributions]
        base = contributions[0].label

        def turn(item: _Item) -> tuple[int, bool]:
            return serial_distance(item.label, base), item.kind != PacketType.CONTRIBUTION

        return [*again, *sorted([*results, *contributions], key=turn)]

    def _drain(self, item: _Item, budget: int, behind: set[int], now: int) -> int:
        """Sends of one item what may leave; returns what is left of ``budget`` bursts."""
        free = not (behind or self.pacer.limited or self._sender.plain)
        if free and item.constrained:
            self._allow(item, behind, now)
        item.constrained = not free
        batch, cost = self._batches(), 1
        for rank in item.shared:
            shared = self._sender.shared[rank]
            batch.point(rank, shared.target)
            cost = max(cost, shared.cost)
        alone = item.shared or len(self._sender.sockets) == 1
        moved = True
        while moved and item.left and budget > 0:
            moved = False
            for channel in item.channels:
                ports = self._sender.ports[channel]
                port = self._port(channel, ports)
                if port < 0 or budget <= 0:
                    continue
                if not free:
                    self._allow(item, behind, now)
                most = max(_TURN, BATCH // len(ports)) if alone else _TURN
                most = self.pacer.bursts(max(1, min(budget // cost, most)), item.stride, cost, now)
                if not most:
                    self.held += 1
                    self._pump_at(self.pacer.opens)
                    return budget
                count = batch.fill(item.flows, item.stride, channel, most)
                if count:
                    self._turns[channel] = (ports.index(port) + 1) % len(ports)
                    taken = self._hand_over(item, port, count, now)
                    budget -= cost * max(taken, 1)
                    moved = True
        return budget

    def _port(self, channel: int, ports: Sequence[int]) -> int:
        """Index of the socket of ``channel`` whose turn it is; -1 if all are full."""
        turn, blocked = self._turns.get(channel, 0), self._blocked
        if not blocked:
            return ports[turn]
        return next((port for port in (*ports[turn:], *ports[:turn]) if port not in blocked), -1)

    def _allow(self, item: _Item, behind: set[int], now: int) -> None:
        """Bursts and their size by flow: what is older goes first, then rates."""
        most, pacer, sent_plain = self.pacer.largest(item.stride), self.pacer, self._sender.plain
        item.flows[:, ALLOWED], item.flows[:, SIZE] = ANY, most
        for flow, (rank, _) in zip(item.flows, item.memory, strict=True):
            ranks = self._sender.ranks_of(rank)
            if not behind.isdisjoint(ranks):
                flow[ALLOWED] = 0
                continue
            plain = rank in sent_plain or not sent_plain.isdisjoint(ranks)
            if not plain and pacer.limited.isdisjoint(ranks):
                continue
            if flow[NEXT] >= flow[TOTAL]:
                continue
            size, allowed, again = pacer.slowest(ranks, item.stride, 1 if plain else most, now)
            flow[SIZE], flow[ALLOWED] = size, allowed
            if again:
                self.held += 1
                self._pump_at(again)

    def _batches(self) -> Batch:
        if self._batch is None:
            self._batch = Batch(self._sender.peers)
        return self._batch

    def _hand_over(self, item: _Item, port: int, count: int, now: int) -> int:
        """Gives the filled messages to the kernel over socket ``port``; returns how many bursts left."""
        assert self._batch is not None
        sender, batch = self._sender, self._batch
        taken, number = batch.send(sender.sockets[port], count)
        if taken:
            item.left, moved = batch.settle(item.flows, taken)
            copies = sum([packets * self._cost(item.memory[flow][0]) for flow, packets, _ in moved])
            self._bytes += copies * item.stride
            self.pacer.left(taken, copies, item.stride, now)
            for flow, packets, bursts in moved:
                self._left(item, item.memory[flow][0], packets, bursts, now)
        if number:
            self._failed(item, port, number, now)
        return taken

    def _cost(self, rank: int) -> int:
        """Copies that this host makes of what leaves for ``rank``, which may stand for a shared channel."""
        return self._sender.shared[rank].cost if rank >= MAX_RANKS else 1

    def _left(self, item: _Item, rank: int, packets: int, bursts: int, now: int) -> None:
        sender, size, prober, paced = self._sender, packets * item.stride, self.prober, self.pacer.limited
        ranks = sender.ranks_of(rank)
        item.packets += packets * len(ranks)
        sender.took(rank, packets, size, bursts)
        for each in paced.intersection(ranks):
            self.pacer.spend(each, size, now)
        if prober is None:
            return
        for each in ranks:
            if not prober.left(each, size, packets, now, each in paced):
                continue
            if prober.missed[each]:
                self.pacer.unheard(each, prober.missed[each], now)
            sent = self._clock()  # and not when the pump began: to send many bursts takes ten milliseconds
            sender.send(each, prober.packet(each, sent, self.pacer.waits(sent)).tobytes())

    def _failed(self, item: _Item, port: int, number: int, now: int) -> None:
        """The first message of a call was refused."""
        assert self._batch is not None
        flow, count = self._batch.order[0]
        rank, sender = int(item.flows[flow][RANK]), self._sender
        if number in FULL:
            sender.calls_of(rank).waits += 1
            self._block(port, number, now)
            return
        sender.refuse(rank, number)
        if number in NO_GSO and count > 1:
            sender.plain.add(rank)
            item.flows[flow][SIZE] = 1
            return
        at = id(item), int(item.flows[flow][NEXT])
        if number == errno.ECONNREFUSED and self._refused != at:
            self._refused = at  # the error belongs to an earlier datagram, this one was not tried
            return
        item.left, _ = self._batch.settle(item.flows, 1)
        sender.lose(rank, int(count))
        if rank in sender.shared:
            sender.shared[rank].broken = True

    def _block(self, port: int, number: int, now: int) -> None:
        self.waits += 1
        if number == errno.EAGAIN:
            self._blocked.add(port)
            self.full.add(port)
            self.pacer.full(sum(map(self._sender.room_of, self.full)), now)
        else:  # a full device is full for the other sockets of the channel as well
            self._blocked.update(next(ports for ports in self._sender.ports if port in ports))
        self._pump_at(now + (_ROOM if number == errno.EAGAIN else _RETRY))

    def _pump_at(self, when: int) -> None:
        self.again = min(self.again, when) if self.again else when

    def _expire(self, item: _Item, now: int) -> None:
        """Drops the stale rows of an item that had to wait."""
        if now > item.until:
            self.stale += self._drop(item, range(len(item.flows)))
        elif item.over is not None:
            over = item.over
            ranks = [self._sender.ranks_of(int(flow[RANK])) for flow in item.flows]
            self.stale += self._drop(item, [i for i, those in enumerate(ranks) if all(over(each) for each in those)])

    def _drop(self, item: _Item, flows: Sequence[int]) -> int:
        dropped = 0
        for i in flows:
            flow = item.flows[i]
            count = int(flow[TOTAL] - flow[NEXT])
            self._sender.lose(int(flow[RANK]), count)
            flow[NEXT] = flow[TOTAL]
            dropped += count
        item.left -= dropped
        return dropped

    def _finish(self) -> None:
        """Says of every submission at the head of its queue that it is over, if it is."""
        for queue in self._queues:
            while queue and not queue[0].left:
                item = queue.popleft()
                if item.done is not None:
                    item.done(item.packets)
