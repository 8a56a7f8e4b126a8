"""What a rank sends with and how fast, and what it asks of its senders (clock-17 and clock-24)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from tailbound.datapath.protocol import Datapath
from tailbound.transport.incast import Incast, allowed
from tailbound.transport.pace import Pacer
from tailbound.transport.probe import Prober
from tailbound.transport.queue import SendQueue
from tailbound.transport.sender import Sender

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
