"""What tests of the send queue share: a stand-in for the system call, and packets."""

from __future__ import annotations

import socket

import numpy as np

from tailbound.transport import batch as batching
from tailbound.transport.queue import SendQueue

ADDRESS, STRIDE = "127.0.0.1", 128


class Kernel:
    """Stands in for ``sendmmsg``: takes what it is told to, fails as it is told to, remembers (flow, packets)."""

    def __init__(self, queue: SendQueue) -> None:
        self.script: list[int] = []  # errno, or minus the number of messages to take
        self.always = 0
        self.taken: list[tuple[int, int]] = []
        queue._batch = batching.Batch(queue._sender.peers)
        self._batch = queue._batch
        self._batch.send = self.send  # type: ignore[method-assign]

    def send(self, sock: socket.socket, count: int) -> tuple[int, int]:
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
