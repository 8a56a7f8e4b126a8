"""A slow rank, two ways.

For any command: the launcher stops its processes (SIGSTOP) and lets them go on (SIGCONT), as a busy
neighbour on the same host does: computation and transport stand still together. ``Freezer`` does it,
at seeded random times.

Once a step, for commands that take part: ``step_delay`` says how long this rank should compute longer,
which leaves its transport running. ``RANK:MS:step`` asks for it; the launcher then stops nobody.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable

from tailbound_lab.lab.spec import Straggler, parse_straggler

__all__ = ["ENVIRONMENT", "Freezer", "step_delay"]

#: Set in every worker: ``RANK:MS:EVERY`` with EVERY in milliseconds or ``step``.
ENVIRONMENT = "TAILBOUND_LAB_STRAGGLER"


def step_delay(rank: int) -> float:
    """Seconds by which ``rank`` should prolong each step; 0.0 unless the lab asks it of this rank.

    Raises:
        ConfigError: the variable is malformed.
    """
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return 0.0
    straggler = parse_straggler(text)
    return straggler.ms / 1000 if straggler.every_ms is None and straggler.rank == rank else 0.0


class Freezer:
    """Stops a process group for ``ms``, again and again, ``every_ms`` apart on average, until closed.

    The running times between stops are exponential, so the stops hit every part of a step alike.

    Args:
        group: process group id.
        straggler: with ``every_ms``.
        seed: of the running times.
        signal_group: ``os.killpg``, or a stand-in.
    """

    def __init__(
        self,
        group: int,
        straggler: Straggler,
        seed: int,
        signal_group: Callable[[int, int], None] = os.killpg,
    ) -> None:
        if straggler.every_ms is None:
            raise ValueError("a straggler that sleeps by itself needs no freezer")
        self._group = group
        self._stop_s = straggler.ms / 1000
        self._mean_run_s = (straggler.every_ms - straggler.ms) / 1000
        self._random = random.Random(seed)
        self._signal = signal_group
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._cycle, name="lab-freezer", daemon=True)
        self.stops = 0

    def run_time(self) -> float:
        """Draw the next running time, in seconds."""
        return self._random.expovariate(1 / self._mean_run_s)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End; the group is running afterwards."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _cycle(self) -> None:
        try:
            while not self._closed.wait(self.run_time()):
                self._signal(self._group, signal.SIGSTOP)
                self.stops += 1
                self._closed.wait(self._stop_s)
                self._signal(self._group, signal.SIGCONT)
        except ProcessLookupError:
            pass  # the command has ended
