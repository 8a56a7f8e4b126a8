"""A slow rank, two ways.

For any command: the launcher stops its processes (SIGSTOP) and lets them go on (SIGCONT), as a busy
neighbour on the same host does: computation and transport stand still together. ``Freezer`` does it.

Once a step, for commands that take part: ``step_delay`` says how long this rank should compute longer,
which leaves its transport running. ``RANK:MS:step`` asks for it; the launcher then stops nobody.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

from tailbound_lab.lab.spec import Straggler, parse_straggler

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


def run_times(straggler: Straggler, seed: int) -> Iterator[float]:
    """Seconds between stops, exponential, so they hit every part of a step alike; for a straggler with ``every_ms``."""
    assert straggler.every_ms is not None
    generator, mean = random.Random(seed), (straggler.every_ms - straggler.ms) / 1000
    while True:
        yield generator.expovariate(1 / mean)


class Freezer:
    """Stops a process group again and again, until closed.

    Args:
        group: process group id.
        seconds: how long each time.
        runs: seconds for which it runs before each stop.
        signal_group: ``os.killpg``, or a stand-in.
    """

    def __init__(
        self, group: int, seconds: float, runs: Iterable[float],
        signal_group: Callable[[int, int], None] = os.killpg,
    ) -> None:  # fmt: skip
        self._group, self._seconds, self._runs, self._signal = group, seconds, runs, signal_group
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._cycle, name="lab-freezer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; the group is running afterwards."""
        self._closed.set()
        self._thread.join()

    def _cycle(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # the command has ended
            for run in self._runs:
                if self._closed.wait(run):
                    return
                self._signal(self._group, signal.SIGSTOP)
                self._closed.wait(self._seconds)
                self._signal(self._group, signal.SIGCONT)
