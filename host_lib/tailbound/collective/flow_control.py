"""What a rank sends with and how fast, and what it asks of its senders (clock-17 and clock-24)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from tailbound.datapath.protocol import Datapath
from tailbound.kernel.fanout import Fanout
from tailbound.transport.choose import Choice, Facts, choose
from tailbound.transport.incast import Incast, allowed
from tailbound.transport.multicast import GroupMember
from tailbound.transport.pace import Pacer
from tailbound.transport.probe import Prober
from tailbound.transport.queue import SendQueue
from tailbound.transport.reach import Ears, Reach
from tailbound.transport.sender import Sender, Shared

#: What receivers advertise changes over tens of ops.
_LOOK_EVERY = 2_000_000
#: Bytes per second that are assumed where neither a driver nor experience says how fast a link is: 1 Gbit/s.
_PACE_UNKNOWN = 1.25e8


class FlowControl:
    """What a job sends with, and what it asks of its senders.

    Args:
        sender: of the job.
        datapath: tells round trips (``peer_states.rtt_ns``) and what peers advertise.
        cookie, rank, peers: of the job.
        link: bytes per second of this rank's link; 0: not known.
        clock: CLOCK_MONOTONIC in ns.
    """

    def __init__(
        self,
        sender: Sender,
        datapath: Datapath,
        cookie: int,
        rank: int,
        peers: Sequence[int],
        link: float = 0.0,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._link = link
        self._states = datapath.store.peer_states
        by: Literal["kernel", "thread"] = "kernel" if datapath.name == "xdp" else "thread"
        self.prober = Prober(cookie, rank, peers, self._states, by) if peers else None
        self.pacer = Pacer(peers, gap=datapath.gap)
        self.queue = SendQueue(sender, self.pacer, self.prober, clock)
        self.incast = Incast(len(peers))
        self._peers = len(peers)
        self._again = 0
        #: newest op up to which all results have been handed to the queue; None: none yet
        self.tip: int | None = None

    def look(self, live: Sequence[int], now: int) -> None:
        """Takes over what live receivers advertise, once in a while: the smallest number is obeyed."""
        if self._peers > 1 and now >= self._again:
            self._again = now + _LOOK_EVERY
            self.queue.limit = allowed(self._states["incast"][list(live)].tolist(), self._peers)

    @property
    def pace(self) -> float:
        """Bytes per second at which this rank can send to all others together.

        The speed of its link, or what has been seen to leave while something waited, if that is less: a virtual link
        calls itself faster than it is, and a switch behind it may be slower.
        """
        return min((pace for pace in (self._link, self.queue.drained) if pace), default=_PACE_UNKNOWN)

    def snapshot(self) -> dict[str, Any]:
        """Counters in plain types; rates in bytes per second (0: unlimited), round trips in microseconds."""
        queue, prober = self.queue, self.prober
        return {
            "queued": queue.packets,
            "stale": queue.stale,
            "socket_full": queue.waits,
            "held_by_rate": queue.held,
            "pace": int(self.pace),
            "rates": {str(rank): int(path.rate) for rank, path in self.pacer.paths.items()},
            "rtt_us": {str(rank): path.rtt / 1000 for rank, path in self.pacer.paths.items()},
            "rtt_by": prober.by if prober else "none",
            "probes": prober.sent if prober else 0,
            "echoes": prober.echoes if prober else 0,
            "open_limit": queue.limit,
            "incast": self.incast.taken,
            "incast_floor": self.incast.floor,
            "incast_falls": self.incast.falls,
        }


class Channels:
    """The channels of one rank that reach all its peers at once: what there is, what is in use, and why.

    ``collective.channels`` opens them, tries them, and moves this state on.

    Args:
        wanted: one of ``choose.RESULTS``.
        facts: what is known before anything is opened.
        sender: of the job.

    Attributes:
        wanted: as above.
        choice: what is done now.
        live: peers that results are for.
        ears: what this rank has heard of the others' trials of the group, for whoever asks.
        reach: whom the own packets to the group reach; None: there is no group.
    """

    def __init__(self, wanted: str, facts: Facts, sender: Sender) -> None:
        self.wanted, self._facts, self._sender = wanted, facts, sender
        self.choice: Choice = choose(wanted, facts)
        self.live: tuple[int, ...] = ()
        self.ears = Ears()
        self.reach: Reach | None = None
        self.fanout: Fanout | None = None
        self.member: GroupMember | None = None
        #: failed clones that are no longer counted as sent: packets, by rank
        self.failed: dict[int, int] = {}
        self.looked_at = 0

    @property
    def opened(self) -> list[Shared]:
        """Those of the sender; the name of each is that of a ``choose.Result``."""
        return list(self._sender.shared.values())

    def channel(self, name: str) -> Shared | None:
        """The channel called ``name``."""
        return next((channel for channel in self.opened if channel.name == name), None)

    def number(self) -> int | None:
        """The destination of results that is in use; None: each peer by itself."""
        return next((n for n, channel in self._sender.shared.items() if channel.name == self.choice.result), None)

    def learn(self, **facts: Any) -> bool:
        """Takes new facts (fields of ``Facts``) and chooses anew; whether results go another way from now on."""
        if all(getattr(self._facts, name) == value for name, value in facts.items()):
            return False  # as nearly always: it is called in every turn
        self._facts = replace(self._facts, **facts)
        before, self.choice = self.choice, choose(self.wanted, self._facts)
        return before.result != self.choice.result

    def snapshot(self) -> dict[str, Any]:
        """What is done and why, and what left over every channel, in plain types."""
        return {
            **self.choice._asdict(),
            "wanted": self.wanted,
            "live": list(self.live),
            "unreached": None if self._facts.unreached is None else list(self._facts.unreached),
            "group": self.member.group if self.member is not None else None,
            "channels": {one.name: {**one.counts.snapshot(), "waits": one.counts.waits} for one in self.opened},
            "clones_failed": {str(rank): packets for rank, packets in self.failed.items()},
        }
