"""What leaves in bursts: how fast, what of an op, until when (clock-17 and clock-24)."""

from __future__ import annotations

import ctypes
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tailbound.collective.op import Op
from tailbound.collective.speaker import Speaker
from tailbound.datapath.protocol import Datapath
from tailbound.kernel.core import core
from tailbound.transport.control import Header
from tailbound.transport.pace import Pacer
from tailbound.transport.queue import Peers, SendQueue
from tailbound.wire.schema import HEADER_BYTES, VERSION, PacketType

#: Bytes per second below which a driver is not believed about rates and bursts: old tun devices say 10 Mbit/s.
_BELIEVED = 1.25e7


class FlowControl:
    """The send queue of a job, and the numbers that it is held to.

    Args:
        job: of the rank.
        datapath: tells round trips (``peer_states.rtt_ns``) and marks.
        link: bytes per second of this rank's link; 0: not known.
        given: the user says so, and not a driver.
    """

    def __init__(self, job: Speaker, datapath: Datapath, link: float, *, given: bool = False) -> None:
        self._job = job
        self._states = datapath.store.peer_states
        peers = list(job.sender.peers)
        by: Literal["kernel", "thread"] = "kernel" if datapath.name == "xdp" else "thread"
        head = Header(version=VERSION, type=PacketType.PROBE, cookie=job.cookie, sender=job.rank)
        known = Peers(head, job.terms, by, job.keys) if peers else None
        # a driver may be wrong, and a link that it is right about sees to its speed itself
        most = link if given else 0.0
        believed = link if given or link >= _BELIEVED else 0.0
        pacer = Pacer(peers, gap=datapath.gap, speed=believed, most=most, room=job.sender.room)
        job.queue = self.queue = SendQueue(job.sender, pacer, known, job.now)
        pacer.link.own = link
        job.voice.line, job.voice.largest = self.queue.line, pacer.largest(job.voice.width + HEADER_BYTES)
        self.queue.said.marks, self.queue.said.voice = ctypes.addressof(job.marks), ctypes.addressof(job.voice)

    def poll(self, now: int) -> None:
        """Once a turn, before ops are moved on: sends what waits."""
        if not self.queue.empty:
            self.queue.pump(now)

    def contributions(self, op: Op, runs: list[tuple[int, NDArray[np.uint8]]]) -> None:
        """Queues the own rows of ``op`` (none: says in its turn that there are none); then its mark rises.

        Of rows for a switch the others are told that they have left (``tb_say_left``).
        """
        job = self._job
        until = (op.start or op.admitted) + job.config.stage_max  # no seal is later, so no row is worth more
        self.queue.submit(op.label, PacketType.CONTRIBUTION, runs, until, job.now(), ctypes.addressof(op))

    def snapshot(self) -> dict[str, Any]:
        """Counters in plain types; rates in bytes per second (0: that of the link), round trips in microseconds.

        ``pace`` is that at which this rank can send to all others together.
        """
        queue, said, paths = self.queue, self.queue.said, self.queue.pacer.paths
        return {
            "queued": said.left,
            "stale": said.stale,
            "socket_full": said.waits,
            "held_by_rate": said.held,
            "pace": int(core().fast.tb_pace(queue.line)),
            "rates": {str(rank): int(path.rate) if path.limited else 0 for rank, path in paths.items()},
            "rtt_us": {str(rank): path.rtt / 1000 for rank, path in paths.items()},
            "rtt_by": queue.probed_by,
            "probes": said.probes,
            "echoes": said.echoes,
            "marked": int(self._states["marked"].sum()),
            "marked_there": said.marked,
            "slowed": sum(path.slowed for path in paths.values()),
        }
