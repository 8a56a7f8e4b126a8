"""A switch for the simulation: hosts at ports with buffers of so many bytes.

Packet by packet: each leaves its host at the rate of the host's link and waits before the receiver's link, the last
hop, where senders meet (incast). A port is first in, first out, and drops what does not fit (tail drop).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tailbound_lab.lab.spec import Background
from tailbound_lab.lab.traffic import PACKET_BYTES, Sender
from tailbound_lab.simulate.fabric import US, Burst, Fabric, S, Terms

#: Of a packet on the wire besides its UDP payload: Ethernet, IPv4 and UDP, as tc counts it in the lab.
HEADERS = 42


@dataclass(frozen=True)
class Switching:
    """What the switches are like.

    Attributes:
        rate: of every host's link, each way, bit/s.
        buffer: bytes that wait before a host's link at most.
        mark: backlog in bytes above which a packet that comes is marked (ECN); 0: none is.
        latency: from host to host without queues, one way, ns.
        loss: probability with which a packet is lost, besides.
        background: foreign bursts towards every host.
        credit, host_credit: ns of its rate that a port, and a host, may send at once after a pause, as tbf does in the
            lab; 0: as a wire.
    """

    rate: int = 10 * 10**9
    buffer: int = 256 << 10
    mark: int = 0
    latency: int = 10 * US
    loss: float = 0.0
    background: Background | None = None
    credit: int = 0
    host_credit: int = 0


class Port:
    """A queue before a link of ``rate`` bytes per second; the other arguments are those of ``Switching``.

    Attributes:
        most: largest backlog there was, bytes.
        marks: packets that were marked.
    """

    def __init__(self, rate: float, buffer: float, mark: int = 0, credit: int = 0) -> None:
        self._each, self._credit, self._mark = S / rate, credit, mark
        self._buffer = buffer
        self._free = 0.0
        self.most = 0.0
        self.marks = 0

    def backlog(self, now: int) -> float:
        """Bytes that wait before it."""
        return max(0.0, (self._free - now) / self._each)

    def take(self, size: int, now: int) -> int:
        """When the last of ``size`` bytes that come now has left, ns; 0: they do not fit."""
        free = self._free
        if (behind := free - now) > 0:
            waiting = behind / self._each + size
            if waiting > self._buffer:
                return 0
            if waiting > self.most:
                self.most = waiting
            if self._mark and waiting > self._mark:
                self.marks += 1
        elif behind < -self._credit:
            free = now - self._credit
        self._free = free = free + size * self._each
        return max(now, int(free))


class Network(Fabric):
    """Hosts at one switch; ``places`` has, for every job, the host of each of its ranks.

    Attributes:
        packets, messages, bytes: that hosts have sent, a packet for everybody once for each; bytes on the wire.
        dropped: packets that did not arrive: at the last hop (``port``), ``loss``.
        marks: packets that were marked, once each; foreign ones are nobody's here.
        take: by job, who takes what arrives there.
    """

    def __init__(self, places: Sequence[Sequence[int]], seed: int, switching: Switching) -> None:
        super().__init__(0, seed, Terms())
        self.switching, self._places = switching, places
        rate, hosts = switching.rate / 8, 1 + max(max(ranks) for ranks in places)
        self.hosts = hosts
        self._out = [Port(rate, float("inf"), credit=switching.host_credit) for _ in range(hosts)]
        self.last_hops = [Port(rate, switching.buffer, switching.mark, switching.credit) for _ in range(hosts)]
        self.take: list[Callable[[Burst], None]] = []
        self.packets = self.messages = self.bytes = self.marks = 0
        self.dropped: Counter[str] = Counter()
        self._seed = seed
        if switching.background is not None:
            self.begin_bursts(switching.background)

    def begin_bursts(self, background: Background) -> None:
        """Foreign bursts towards every host from now on; they are those of the lab (``lab.traffic``)."""
        self.switching = replace(self.switching, background=background)
        self._foreign = Sender(background, self._seed, self.hosts)
        self._begun = self.now
        self.at(self.now + int(self._foreign.due * S), self._intrude)

    def has_room(self, rank: int, job: int = 0) -> bool:
        """See ``Fabric``."""
        return self._out[self._places[job][rank]].backlog(self.clock) < self.terms.room

    def room_at(self, rank: int, job: int = 0) -> int:
        """See ``Fabric``."""
        excess = self._out[self._places[job][rank]].backlog(self.clock) - self.terms.room
        return self.clock + max(0, int(excess * 8 * S / self.switching.rate)) + 1 * US

    def send(self, burst: Burst) -> None:
        """Its packets leave one after the other."""
        places, switching = self._places[burst.job], self.switching
        out, clock = self._out[places[burst.source]], self.clock
        self.messages += 1
        data, stride = burst.data, burst.stride
        for at in range(0, len(data), stride):
            part = data[at : at + stride]
            size = len(part) + HEADERS
            self.packets += 1
            self.bytes += size
            left = out.take(size, clock)
            packet = burst if len(data) <= stride else Burst(burst.source, burst.to, part, stride, burst.job)
            self.at(left + switching.latency, partial(self._arrive_at_last, packet, places[burst.to], size))

    def _arrive_at_last(self, packet: Burst, to: int, size: int) -> None:
        port = self.last_hops[to]
        before = port.marks
        left = port.take(size, self.now)
        if port.marks != before:
            packet.marked = True
            self.marks += 1
        if not left:
            self.dropped["port"] += 1
        elif self.switching.loss and self.random.random() < self.switching.loss:
            self.dropped["loss"] += 1
        else:
            self.at(left, partial(self.take[packet.job], packet))

    def _intrude(self) -> None:
        """Foreign packets come to the last hops; what of them does not fit is nobody's loss here."""
        size = PACKET_BYTES + HEADERS
        for host in self._foreign.take((self.now - self._begun) / S):
            for _ in range(self._foreign.packets):
                self.last_hops[host].take(size, self.now)
        self.at(max(self.now + US, self._begun + int(self._foreign.due * S)), self._intrude)
