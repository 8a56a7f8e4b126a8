"""Jobs that reduce all the time, and flows of TCP, over one simulated network: what each of them gets.

A job's ranks launch their next op as soon as the one before is over. A flow of TCP is one bulk transfer to a host:
slow start, additive increase, and half a window less once a round trip for what was lost or, if it knows of ECN, marked
(RFC 5681, RFC 3168). It is a stranger's control law, so it is the classic one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from tailbound.wire.schema import PacketType
from tailbound_lab.simulate.engine import Done
from tailbound_lab.simulate.fabric import MS, US, S
from tailbound_lab.simulate.layouts import beside
from tailbound_lab.simulate.ports import HEADERS, Network, Port, Switching
from tailbound_lab.simulate.steps import Team

_SEGMENT = 1448 + 12 + HEADERS
#: Without an acknowledgement for so long a flow begins anew, twice as long the next time, ns (Linux, at least).
_TIMEOUT, _TIMEOUT_MOST = 200 * MS, 3_200 * MS
#: And a segment is sent again by itself after two round trips and this, ns: two ticks of a kernel of 250 Hz (RFC 8985).
_PROBE = 8 * MS


class Tcp:
    """A flow from a host of its own to ``host``, from now on.

    A loss is noticed by later packets that have come. Where nothing has, one segment is sent again after two
    round trips, if more than one was on the way; where that is lost, too, the timer decides.

    Args:
        network: the network.
        host: where it goes.
        ecn: it knows of marks.

    Attributes:
        sent, dropped: segments that have left, and those that the host's port had no room for.
        delivered: bytes on the wire that have come.
    """

    def __init__(self, network: Network, host: int, *, ecn: bool) -> None:
        self._network, self._port, self._ecn = network, network.last_hops[host], ecn
        self._out = Port(network.switching.rate / 8, float("inf"))
        self._window, self._threshold = 10.0, float("inf")
        self._flying = 0
        self._lost = 0  # of these, what will not come, as no rank knows yet
        self._lowered = 0  # when the window last was; segments that left before are of that round trip
        self._rtt = 0
        self._waits, self._number = _TIMEOUT, 0  # for how long, and how often an acknowledgement has come
        self.sent = self.dropped = self.delivered = 0
        network.at(network.now, self._send)

    def _send(self) -> None:
        while self._flying < int(self._window):
            self._leave()
        self._wait()

    def _leave(self) -> None:
        network = self._network
        self._flying += 1
        self.sent += 1
        left = self._out.take(_SEGMENT, network.now)
        network.at(left + network.switching.latency, partial(self._arrive, network.now))

    def _arrive(self, sent: int) -> None:
        network, marks = self._network, self._port.marks
        if not (left := self._port.take(_SEGMENT, network.now)):
            self._lost += 1
            self.dropped += 1
            return
        marked = self._ecn and self._port.marks != marks
        network.at(left + network.switching.latency, partial(self._acknowledged, sent, self._lost, marked))

    def _acknowledged(self, sent: int, lost: int, marked: bool) -> None:
        """``lost``: segments before this one that will not come."""
        network = self._network
        self._number += 1
        self._waits, self._rtt = _TIMEOUT, network.now - sent
        lost = min(lost, self._lost)
        self._lost -= lost
        self._flying = max(0, self._flying - 1 - lost)
        self.delivered += _SEGMENT
        if marked or lost:
            self._lower(sent)
        elif self._window < self._threshold:
            self._window += 1
        else:
            self._window += 1 / self._window
        self._send()

    def _wait(self) -> None:
        """For the next acknowledgement."""
        network, number = self._network, self._number

        def probe() -> None:
            if number == self._number:
                self._leave()

        def timeout() -> None:
            if number != self._number:
                return
            self._waits = min(_TIMEOUT_MOST, 2 * self._waits)
            self._threshold, self._window = max(2.0, self._window / 2), 1.0
            self._flying = self._lost = 0
            self._send()

        if self._flying > 1:
            network.at(network.now + 2 * self._rtt + _PROBE, probe)
        network.at(network.now + self._waits, timeout)

    def _lower(self, sent: int) -> None:
        if sent < self._lowered:
            return
        self._lowered = self._network.now
        self._window = self._threshold = max(2.0, self._window / 2)


@dataclass
class Shares:
    """What neighbours got in the time that counts.

    Attributes:
        ops: a second, by job.
        tcp: share of the link, by flow.
        expected, delivered: rows of all jobs.
        packets, dropped: of all jobs and flows.
        kinds: packets of jobs, by the name of their type.
    """

    ops: list[float]
    tcp: list[float]
    expected: int = 0
    delivered: int = 0
    packets: int = 0
    dropped: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    @property
    def jain(self) -> float | None:
        """Jain's index of the jobs' ops a second: 1 where all have the same (DEC-TR-301); None where no op ended."""
        squares = sum(ops * ops for ops in self.ops)
        return sum(self.ops) ** 2 / (len(self.ops) * squares) if squares else None


def share(
    ranks: int,
    size: int,
    switching: Switching,
    *,
    jobs: int = 1,
    tcp: int = 0,
    ecn: bool = True,
    apart: int = 0,
    warm: float = 1.0,
    seconds: float = 2.0,
) -> Shares:
    """Runs ``jobs`` of ``ranks`` on the same hosts, each with all-reduces of ``size`` bytes of float32.

    Args:
        ranks: of each job, one a host.
        size: bytes.
        switching: of the network.
        jobs: how many.
        tcp: flows of TCP, to host 0.
        ecn: they know of marks.
        apart: ranks pause for up to so many ns before each op, each for itself.
        warm: simulated seconds before those that count; flows begin after half of them.
        seconds: simulated seconds that count.
    """
    team = Team(beside(jobs, ranks, size // 4), switching, 1, rate=switching.rate / 8)
    network = team.network
    counted = Shares([0.0] * jobs, [])
    begin = network.now + int(warm * S)
    over = begin + int(seconds * S)

    def launch(rank: int) -> None:
        part = team.arrangement.parts[rank][0]

        def done(one: Done) -> None:
            if network.clock >= begin:
                counted.ops[part.job] += 1 / ranks / seconds
                counted.expected += one.outcome.expected
                counted.delivered += one.outcome.delivered
            again(rank)

        team.node(part).submit(0, team.data(rank, 0), team.result(rank), done)

    def again(rank: int) -> None:
        network.at(network.clock + US + network.random.randrange(apart + 1), partial(launch, rank))

    def counts() -> tuple[int, int]:
        """Of jobs and flows together, as the lab's queues count."""
        packets, dropped = network.packets, sum(network.dropped.values())
        return packets + sum(flow.sent for flow in flows), dropped + sum(flow.dropped for flow in flows)

    for rank in range(len(team.arrangement.parts)):
        again(rank)
    flows: list[Tcp] = []
    # jobs know by then how long their ops take: the first ones wait two seconds for whatever is lost
    network.at(begin - int(warm * S) // 2, lambda: flows.extend(Tcp(network, 0, ecn=ecn) for _ in range(tcp)))
    before: list[int] = []
    kinds: Counter[int] = Counter()

    def start() -> None:
        kinds.update(network.kinds)
        before[:] = [flow.delivered for flow in flows]
        counted.packets, counted.dropped = (-value for value in counts())

    network.at(begin, start)
    network.run(lambda: network.now >= over, int((warm + seconds + 60) * S))
    for world in team.worlds:
        if world.error is not None:
            raise world.error
    packets, dropped = counts()
    counted.packets += packets
    counted.dropped += dropped
    counted.kinds = {PacketType(kind).name.lower(): count for kind, count in (network.kinds - kinds).items()}
    link = switching.rate / 8 * seconds
    counted.tcp = [(flow.delivered - was) / link for flow, was in zip(flows, before, strict=True)]
    team.close()
    return counted
