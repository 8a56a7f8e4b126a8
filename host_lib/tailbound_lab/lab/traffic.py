"""Foreign traffic of a shared cloud: the process that sends it, and when it sends.

Bursts of UDP towards every worker, from a namespace of its own at the switch, through the same cables and queues as
the job's packets, on both links at the same moments. Every worker has a schedule of its own: lengths uniform in
0.8..1.2 times the mean, pauses exponential (the on/off sources of Willinger et al., SIGCOMM'95, with a bounded "on"
part), both from the seed. The sender never catches up by more than it may send in ``_LAG_SECONDS``, so no burst exceeds
its rate for longer than that. Packets go to an address nobody has, at the worker's MAC: its stack drops them without
an answer.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tailbound.transport.sockets import reserve
from tailbound_lab.lab import enter, namespaces
from tailbound_lab.lab.spec import Background
from tailbound_lab.lab.topology import LINKS, Topology

#: RFC 863; nobody listens anyway.
_PORT = 9
#: Bytes of a datagram, where the lab's MTU has room for them.
PACKET_BYTES = 1400
#: Headers on the wire, Ethernet's included: the rate is that of frames, as tbf counts it.
_HEADER_BYTES = 42
#: Those of IPv4 and UDP, which have to fit the MTU with the datagram.
_IP_UDP_BYTES = 28
_MOST_PACKETS = 44  # one super-frame
_CHUNK_SECONDS = 0.0005
_LAG_SECONDS = 0.005
_SOL_UDP, _UDP_SEGMENT = 17, 103
_END_SECONDS = 5.0


def schedule(background: Background, seed: int, rank: int) -> Iterator[tuple[float, float]]:
    """(begin, length) of the bursts towards ``rank``, in seconds from the start, for ever."""
    generator = random.Random(f"background/{seed}/{rank}")
    at = 0.0
    while True:
        at += generator.expovariate(1000 / background.off_ms)
        length = generator.uniform(0.8, 1.2) * background.on_ms / 1000
        yield at, length
        at += length


class Sender:
    """Decides what to send when, in datagrams of ``size`` bytes; pure: a test needs neither network nor clock."""

    def __init__(self, background: Background, seed: int, ranks: int, size: int = PACKET_BYTES) -> None:
        frame = 8 * (size + _HEADER_BYTES)
        self.packets = max(1, min(_MOST_PACKETS, int(background.rate * _CHUNK_SECONDS / frame)))
        self.interval = self.packets * frame / background.rate
        self._schedules = [schedule(background, seed, rank) for rank in range(ranks)]
        # next chunk of every rank: (time, rank, end of its burst)
        self._next: list[tuple[float, int, float]] = []
        for rank in range(ranks):
            self._begin(rank)

    def _begin(self, rank: int) -> None:
        begin, length = next(self._schedules[rank])
        heapq.heappush(self._next, (begin, rank, begin + length))

    @property
    def due(self) -> float:
        """When the next chunk is due, in seconds from the start."""
        return self._next[0][0]

    def take(self, now: float) -> list[int]:
        """Ranks to send a chunk of ``packets`` packets each at ``now``; may name a rank several times."""
        out = []
        while self._next[0][0] <= now:
            at, rank, end = heapq.heappop(self._next)
            at = max(at, now - _LAG_SECONDS)
            if at >= end:
                self._begin(rank)
                continue
            out.append(rank)
            heapq.heappush(self._next, (at + self.interval, rank, end))
        return out


def start(topology: Topology, background: Background, seed: int, mtu: int) -> subprocess.Popen[Any]:
    """Starts the process; it ends when its standard input does, that is, with this process at the latest.

    Datagrams fit the lab's ``mtu``: the kernel cuts no burst into segments that do not.
    """
    assert topology.background is not None
    job = {
        "size": min(PACKET_BYTES, mtu - _IP_UDP_BYTES),
        "background": [background.rate, background.on_ms, background.off_ms],
        "seed": seed,
        "targets": [[link.nobody(worker.rank) for link in LINKS] for worker in topology.workers],
        "sources": [link.background_address for link in LINKS],
    }
    shim = [sys.executable, "-I", "-S", str(Path(enter.__file__)), str(namespaces.path(topology.background)), "--"]
    return subprocess.Popen(
        [*shim, sys.executable, "-m", __name__, json.dumps(job)], stdin=subprocess.PIPE, process_group=0
    )


def stop(process: subprocess.Popen[Any]) -> bool:
    """Ends it; whether it was still running."""
    assert process.stdin is not None
    running = process.poll() is None
    process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return running


def _open(address: str, size: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    reserve(made, socket.SO_SNDBUF, 8 << 20)
    made.setsockopt(_SOL_UDP, _UDP_SEGMENT, size)
    made.setblocking(False)
    made.bind((address, 0))
    return made


def main(job: dict[str, Any]) -> None:
    """Sends until standard input ends."""
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # a starved sender would bunch what it has to spread
    size, targets = job["size"], job["targets"]
    sockets = [_open(address, size) for address in job["sources"]]
    sender = Sender(Background(*job["background"]), job["seed"], len(targets), size)
    chunk = bytes(sender.packets * size)
    begin = time.monotonic()
    while True:
        wait = begin + sender.due - time.monotonic()
        if wait > 0 and select.select([0], [], [], wait)[0]:
            return
        for rank in sender.take(time.monotonic() - begin):
            for made, address in zip(sockets, targets[rank], strict=True):
                try:
                    made.sendto(chunk, (address, _PORT))
                except BlockingIOError:
                    continue  # the queue is full, which is what a burst is for
        if select.select([0], [], [], 0)[0]:
            return


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
