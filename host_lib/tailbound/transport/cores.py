"""How long a thread has waited for a core, as the kernel counts it. Reading only; ``terms.Overtime`` decides by it.

A thread that could run and does not waits for a core. That is neither a slow network nor a stop: one that was stopped
is on no run queue, and its timers are late all the same.
Format: Documentation/scheduler/sched-stats.rst of the kernel, "/proc/<pid>/schedstat": ns on a core, ns on a run queue,
and how many times it ran.
"""

from __future__ import annotations

import os

_FILE = "/proc/thread-self/schedstat"
#: Longer than three numbers of 64 bits.
_LENGTH = 64


class RunQueue:
    """Of the thread that makes it; any thread may ask. A question takes 1.5 us."""

    def __init__(self) -> None:
        try:
            self._fd = os.open(_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no /proc, or a kernel that does not count
            self._fd = -1

    def waited(self) -> int | None:
        """How long the thread has waited for a core since it began, ns; None: the kernel does not tell."""
        if self._fd < 0:
            return None
        try:
            ran, waited, _ = map(int, os.pread(self._fd, _LENGTH, 0).split())
        except (OSError, ValueError):
            return None
        return waited if ran else None  # one that does not count says zero

    def close(self) -> None:
        """Closes the file; ``waited`` is None from then on."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
