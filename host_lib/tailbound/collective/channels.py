"""One burst to all peers: opens what can do it, follows the live set, and says what is done instead.

Nothing here fails a job: what cannot be had is told by an event and in ``stats()``. An owner's results come to its
N - 1 peers by a send to each (``peers``), one burst that this host's kernel clones (``fanout``), or one that the
network multiplies (``multicast``). ``auto`` is ``fanout`` where it works, else ``peers``. Multicast has to be asked
for: all owners publish at about the same time, and each of them can fill every receiver's link by itself
(docs/transport.md). Where the network does not deliver it, a peer complains of missing rows, and it is given up.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.collective.speaker import Speaker
from tailbound.datapath.protocol import Datapath
from tailbound.errors import AttachError, CapabilityError
from tailbound.forks import keep_from_children
from tailbound.kernel.fanout import Fanout
from tailbound.transport.config import MS
from tailbound.transport.multicast import group_of, join
from tailbound.transport.queue import SendQueue
from tailbound.transport.sender import Shared
from tailbound.transport.sockets import neighbouring_sockets, ports_of, room_of, sending_socket
from tailbound.transport.steps import step_of
from tailbound.wire.address import is_ipv6, words_of

#: How often failed clones are taken off what counts as sent.
_COUNT_EVERY = 200 * MS
#: Bytes in flight that the socket of a group has room for.
_GROUP_ROOM = 512 << 10


class Choice(NamedTuple):
    """A way of results, and the reason for it."""

    result: str
    reason: str


class Channels:
    """The channels of one rank that reach all its peers at once: what there is, what is in use, and why.

    Args:
        job: of the rank.
        queue: whose pace and limits say whether peers are to be sent to in turns.
        datapath: which packets come over, and over which interface.

    Attributes:
        wanted: what was asked for, one of ``config.RESULTS``.
        choice: what is done now.
        live: peers that results are for.
        fanout: the program that clones bursts; None: there is none.
    """

    def __init__(self, job: Speaker, queue: SendQueue, datapath: Datapath) -> None:
        self._job, self._queue, self._datapath = job, queue, datapath
        self.wanted = job.config.result
        self._why_not: dict[str, str] = {}  # by the name of a channel that cannot be had, or is given up
        self.live: tuple[int, ...] = ()
        self.fanout: Fanout | None = None
        self._failed: dict[int, int] = {}  # clones that are no longer counted as sent: packets, by rank
        self._looked_at = 0
        self._followed: list[int] | None = None  # who was there
        self._doubted: frozenset[int] = frozenset()  # suspects at that time
        self.choice = self._choose()
        keep_from_children(self)

    # -- opening them -------------------------------------------------------------------------------------------------

    def open(self, address: str, endpoints: Mapping[int, tuple[str, int]], *, alone: bool) -> None:
        """Opens those that the job may use; called once, before its thread starts.

        Args:
            address: own IP address.
            endpoints: (IP address, UDP port) of the peers by rank.
            alone: no rank is on the udp datapath.
        """
        job, refused = self._job, ""
        if job.switch is not None:
            refused = "a switch sums and sends the results"
        elif job.ranks <= 2:
            refused = "there are no two peers that get the same"
        elif not alone or self._datapath.name == "udp":
            refused = "the udp datapath sends to each peer by itself"
        wanted = {"fanout": self.wanted != "peers", "multicast": self.wanted == "multicast"}
        for name, open_one in (("fanout", self._open_fanout), ("multicast", self._open_multicast)):
            if not wanted[name] or refused:
                self._why_not[name] = refused
                continue
            try:
                with contextlib.ExitStack() as opened:
                    open_one(address, endpoints, opened)
                    opened.pop_all()
            except (CapabilityError, AttachError) as error:
                self._why_not[name] = f"no {name}: {error}"
        self.choice = self._choose()
        self.follow()
        self._say(wanted=self.choice.result == self.wanted or self.wanted == "auto")

    def _open_fanout(
        self, address: str, endpoints: Mapping[int, tuple[str, int]], opened: contextlib.ExitStack
    ) -> None:
        job, interface = self._job, self._datapath.interface
        ports = ports_of(len(endpoints), job.config.source_ports)
        to = {self._datapath.endpoint[1], *(port for _, port in endpoints.values())}
        if len(to) > 1:
            raise CapabilityError(
                f"ranks receive at UDP ports {', '.join(map(str, sorted(to)))}, and copies go to one port: give all "
                "ranks the same (attach --port, TAILBOUND_PORT)"
            )
        socks = tuple(neighbouring_sockets(address, ports, room_of(len(endpoints) * ports)))
        for sock in socks:
            opened.callback(sock.close)
        fanout = _attach(interface, address, socks[0].getsockname()[1], to.pop(), len(socks), len(endpoints))
        opened.callback(fanout.close)
        fanout.set_peers(job.rank, {rank: host for rank, (host, _) in endpoints.items()})
        self.fanout = fanout
        job.sender.share(Shared("fanout", socks))

    def _open_multicast(
        self, address: str, endpoints: Mapping[int, tuple[str, int]], opened: contextlib.ExitStack
    ) -> None:
        job, port = self._job, self._datapath.endpoint[1]
        if is_ipv6(address):
            raise CapabilityError(
                "groups are of IPv4, and this job talks over IPv6: use TAILBOUND_RESULT=fanout or peers"
            )
        group = group_of(job.cookie, job.config.group)
        ports = ports_of(len(endpoints), job.config.source_ports)
        socks = tuple(sending_socket(address, _GROUP_ROOM // ports) for _ in range(ports))
        for sock in socks:
            opened.callback(sock.close)
            join(sock, group, address)
        job.store.control["group"] = words_of(group).address
        job.sender.share(Shared("multicast", socks, (group, port), local=False))

    def close(self) -> None:
        """Detaches and leaves; may be called twice, when no rank sends any more."""
        if self.fanout is not None:
            self._take_back()
            self.fanout.close()
            self.fanout = None
        for channel in self.opened:
            for sock in channel.sockets:
                sock.close()

    def descriptors(self) -> list[int]:
        """See ``forks.Owner``."""
        return [sock.fileno() for channel in self.opened for sock in channel.sockets if sock.fileno() >= 0]

    # -- using them ---------------------------------------------------------------------------------------------------

    @property
    def opened(self) -> list[Shared]:
        """Those of the sender; the name of each is that of a ``choose.Result``."""
        return list(self._job.sender.shared.values())

    def channel(self, name: str) -> Shared | None:
        """The channel called ``name``."""
        return next((channel for channel in self.opened if channel.name == name), None)

    def number(self) -> int | None:
        """The destination of results that is in use; None: each peer by itself."""
        shared = self._job.sender.shared
        return next((n for n, channel in shared.items() if channel.name == self.choice.result), None)

    def runs(self, rows: NDArray[np.uint8]) -> list[tuple[int, NDArray[np.uint8]]]:
        """``rows`` (u8[count, stride], headers finished, the same for all) as runs for the send queue."""
        job, queue = self._job, self._queue
        self.follow()
        number = self.number()
        if number is not None:
            channel = job.sender.shared[number]
            # receivers that take few senders at once are to be sent to bit by bit, one behind a slow link by itself:
            # a burst to all is as slow as the slowest
            together = len(channel.ranks) >= 2 and not queue.pacer.granted
            together &= self.wanted == self.choice.result or queue.pacer.even(channel.ranks)
            if together and not channel.broken:
                job.counters["results_at_once"] += 1
                return [(number, rows)]
            job.counters["results_apart"] += 1
        return [(peer, rows) for peer in self.live]

    def follow(self) -> None:
        """Lets results go to who is there: not to who has said goodbye, nor to who is dead as far as one can tell.

        A rank that is only stopped is taken to be dead soon, but finds what its kernel has received when it goes on; so
        one that is dead gets results as long as there is room for them. No suspect leads a burst: it may have no host.
        """
        job, here, suspects = self._job, self._job.membership.here, self._job.membership.suspects
        if here is self._followed and not suspects and not self._doubted:
            return  # no rank can be dead, and who is there has not changed
        dead = job.membership.dead(step_of(job.sequence.upcoming))
        live = tuple(p for p in here if not (p in dead and job.beyond(p)))
        self._followed = here
        if live == self.live and suspects == self._doubted:
            return
        before, self.live, self._doubted = self.live, live, suspects
        if self.fanout is not None:
            self.fanout.live(live, suspects)
            if (lead := self.fanout.lead) is not None and (clones := self.channel("fanout")) is not None:
                clones.target = job.sender.peers[lead]
        if live == before:
            return
        for channel in self.opened:
            channel.ranks, channel.broken = live, False
        self._queue.pacer.holds(job.sender.room)
        self._judge()

    def poll(self, now: int) -> None:
        """Counts, and goes on with other channels where one has broken; at any time."""
        if now >= self._looked_at + _COUNT_EVERY and self.opened:
            self._looked_at = now
            self.follow()
            self._take_back()
            self._judge()

    def _take_back(self) -> None:
        """Clones that could not be made had been counted as sent."""
        channel, counts = self.channel("fanout"), self._job.sender.counts
        if self.fanout is None or channel is None:
            return
        news = []
        size = channel.counts.bytes // max(1, channel.counts.packets)
        for rank, clones in self.fanout.counts().items():
            more = clones.packets_failed - self._failed.get(rank, 0)
            if more and rank in counts:
                self._failed[rank] = clones.packets_failed
                news.append((rank, more, more * size))
        channel.take_back(counts, news)

    # -- choosing -----------------------------------------------------------------------------------------------------

    def complained(self, peer: int) -> bool:
        """Most of the own rows do not come to ``peer``, op after op; returns whether multicast is given up for that."""
        if self.choice.result != "multicast":
            return False
        self._why_not["multicast"] = f"multicast does not reach {peer}, and is given up"
        self._judge()
        return True

    def _choose(self) -> Choice:
        if self.wanted == "peers":
            return Choice("peers", "asked for")
        why = {name: f"no {name}: not tried" for name in ("fanout", "multicast")}
        for channel in self.opened:
            why[channel.name] = f"bursts are refused ({', '.join(channel.counts.errors)})" if channel.broken else ""
        why |= self._why_not
        if self.wanted == "multicast" and not why["multicast"]:
            return Choice("multicast", "asked for")
        reasons = [why["multicast"]] if self.wanted == "multicast" else []
        if not why["fanout"]:
            own = "asked for" if self.wanted == "fanout" else "this kernel clones bursts"
            return Choice("fanout", "; ".join(reasons) or own)
        return Choice("peers", "; ".join(dict.fromkeys([*reasons, why["fanout"]])))

    def _judge(self) -> None:
        before, self.choice = self.choice, self._choose()
        if before.result != self.choice.result:
            self._say(wanted=before.result == "peers" or self.choice.result == "multicast")

    def _say(self, *, wanted: bool) -> None:
        choice = self.choice
        self._job.events.emit(
            "results_by",
            f"results leave by {choice.result}: {choice.reason}",
            level=logging.INFO if wanted else logging.WARNING,
            **choice._asdict(),
        )
        if not wanted:
            self._job.counters["result_fallbacks"] += 1

    def snapshot(self) -> dict[str, Any]:
        """What is done and why, and what left over every channel, in plain types."""
        return {
            **self.choice._asdict(),
            "wanted": self.wanted,
            "live": list(self.live),
            "group": group.target[0] if (group := self.channel("multicast")) is not None else None,
            "channels": {one.name: {**one.counts.snapshot(), "waits": one.counts.waits} for one in self.opened},
            "clones_failed": {str(rank): packets for rank, packets in self._failed.items()},
        }


def _attach(interface: str, address: str, port: int, to: int, ports: int, peers: int) -> Fanout:
    """The program of this process, or the one that ``tailbound attach`` has left for processes without privileges."""
    try:
        return Fanout.attach(interface, port, to, ports=ports, peers=peers, address=address)
    except CapabilityError as error:
        try:
            return Fanout.open(interface, port, ports, address=address)
        except (AttachError, CapabilityError):
            raise error from None
