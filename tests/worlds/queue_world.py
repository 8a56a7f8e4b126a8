"""What tests of the send queue share: sockets that do as they are told, and packets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from tailbound.transport.pace import Pacer
from tailbound.transport.queue import SendQueue
from tailbound.transport.sender import Sender, Shared
from tailbound.transport.sockets import Socket
from tailbound.wire.schema import PacketType
from tailbound_lab.simulate.messages import read

ADDRESS, STRIDE = "127.0.0.1", 128
MS = 1_000_000
#: A time that never comes.
LATER = 1 << 62


class Told:
    """A ``transport.sockets.Socket`` in the place of ``sock`` that asks ``kernel``."""

    def __init__(self, sock: Socket, kernel: Kernel) -> None:
        self.sock, self._kernel = sock, kernel

    def fileno(self) -> int:
        return self.sock.fileno()

    def room(self) -> int:
        return self.sock.room()

    def send_one(self, packet: bytes, target: tuple[str, int]) -> int:
        return self._kernel.send_one(packet, target)

    def send_many(self, messages: int, count: int) -> tuple[int, int]:
        return self._kernel.send_many(self.sock, messages, count)


class Kernel:
    """Stands behind all sockets of a queue: takes and fails as it is told to, remembers (rank, packets) of each burst.

    Attributes:
        script: for the next calls, errno, or minus the number of messages to take.
        always: the same for all others.
        taken: bursts.
        data: what was in them, by rank.
        single: (target, packet) of packets that left by themselves.
    """

    def __init__(self, queue: SendQueue) -> None:
        self.script: list[int] = []
        self.always = 0
        self.taken: list[tuple[int, int]] = []
        self.data: defaultdict[int, bytearray] = defaultdict(bytearray)
        self.single: list[tuple[tuple[str, int], bytes]] = []
        self._batch = queue._batches()
        sockets = queue._sender.sockets
        sockets[:] = [Told(sock, self) for sock in sockets]

    def send_one(self, packet: bytes, target: tuple[str, int]) -> int:
        number = max(0, self.script.pop(0) if self.script else self.always)
        if not number:
            self.single.append((target, packet))
        return number

    def send_many(self, sock: Socket, messages: int, count: int) -> tuple[int, int]:
        taken, number = self.send(sock, count)
        for (rank, _), message in zip(self.taken[len(self.taken) - taken :], read(messages, taken), strict=True):
            self.data[rank] += message.data
        return taken, number

    def send(self, sock: Socket, count: int) -> tuple[int, int]:
        step = self.script.pop(0) if self.script else self.always
        if step > 0:
            return 0, step
        count = min(count, -step) if step else count
        for m in range(count):
            rank = int(np.flatnonzero(self._batch._pointers == self._batch._messages[m, 0])[0])
            self.taken.append((rank, int(self._batch.order[m, 1])))
        return count, 0


def memory(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, STRIDE), np.uint8)


class Line:
    """A queue to ranks 1, 2 and 3 over ``sockets``, which do as ``kernel`` is told.

    Attributes:
        done: packets that have left of each submission that is over.
    """

    def __init__(self, sockets: Sequence[Socket], pacer: Pacer | None = None, shared: Shared | None = None) -> None:
        self.sender = Sender(sockets, dict.fromkeys((1, 2, 3), (ADDRESS, 9)))
        if shared is not None:
            self.sender.share(shared)
        self.queue = SendQueue(self.sender, pacer)
        self.kernel = Kernel(self.queue)
        self.done: list[int] = []

    @property
    def taken(self) -> list[tuple[int, int]]:
        return self.kernel.taken

    def submit(
        self, op: int, kind: PacketType, *runs: tuple[int, int], now: int = 0, until: int = LATER, **more: Any
    ) -> None:
        """Rows of ``op``, given as (rank, packets)."""
        given = [(rank, memory(count, seed=rank)) for rank, count in runs]
        self.queue.submit(op, kind, given, until, self.done.append, now, **more)

    def go(self, now: int = 1) -> None:
        """Sockets have room from now on."""
        self.kernel.always = 0
        self.queue.pump(now)

    def rest(self, now: int) -> int:
        """Pumps whenever the queue says so until it is empty; when that is."""
        while not self.queue.empty:
            now = max(now, self.queue.again)
            self.queue.pump(now)
        return now
