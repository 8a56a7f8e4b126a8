"""A starting line for processes on one machine, in shared memory: nothing on any network is needed to start together.

A barrier over Gloo would let go of one rank 200 ms after the others whenever a packet of it is lost (TCP's shortest
retransmission timeout), and what is measured afterwards would begin with that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tailbound.errors import TransportError

#: From the moment the last rank has come to the common start; longer than it takes all to wake up.
_LEAD_NS = 400_000
_POLL_SECONDS = 50e-6


class StartLine:
    """Ranks that call ``wait`` return from it at the same time, as well as a machine can wake them.

    ``path`` is a file that all ranks share, made by ``create``; ``timeout`` is in seconds.
    """

    def __init__(self, path: Path, rank: int, ranks: int, timeout: float = 120.0) -> None:
        # words of u64: how often each rank has come, and the time of the newest start
        self._words = np.memmap(path, np.uint64, "r+", shape=(ranks + 1,))
        self._rank, self._ranks, self._timeout = rank, ranks, timeout
        self._times = 0
        self._last = 0
        #: whether rank 0 said at the newest start that it was the last one
        self.over = False

    @staticmethod
    def create(path: Path, ranks: int) -> None:
        """Makes the file."""
        path.write_bytes(bytes(8 * (ranks + 1)))

    def wait(self, *, last: bool = False, meanwhile: Callable[[], None] | None = None) -> int:
        """Waits for all ranks; returns the common start (CLOCK_MONOTONIC in ns).

        Args:
            last: said by rank 0, reaches all ranks at this start as ``over``: so they end a phase in the same round.
            meanwhile: called when all ranks have come, before they start; it should take microseconds.

        Raises:
            TransportError: a rank did not come in time.
        """
        self._times += 1
        self._words[self._rank] = self._times
        end = time.monotonic() + self._timeout
        if self._rank == 0:
            while (come := self._words[: self._ranks]).min() < self._times:
                self._pause(end, f"rank {int(come.argmin())} did not come to the start")
            self._words[self._ranks] = (time.monotonic_ns() + _LEAD_NS) & ~1 | last
        while (start := int(self._words[self._ranks])) <= self._last:
            self._pause(end, "rank 0 did not give the start")
        self._last = start
        self.over = bool(start & 1)
        if meanwhile is not None:
            meanwhile()
        while (left := start - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)
        return start

    def _pause(self, end: float, why: str) -> None:
        if time.monotonic() > end:
            raise TransportError(f"{why} within {self._timeout:g} s: see its output, or run fewer workers")
        time.sleep(_POLL_SECONDS)
