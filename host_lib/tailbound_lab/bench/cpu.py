"""Processor time of the whole machine, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path

STAT = Path("/proc/stat")
#: Columns after the word ``cpu``. What another guest of the same host takes (steal) is none of ours.
USER, NICE, SYSTEM, IDLE, IOWAIT, IRQ, SOFTIRQ, STEAL = range(8)


def busy_seconds(table: Path = STAT) -> float:
    """Seconds that the processors have not been idle since the machine started, interrupts included."""
    return seconds(table.read_bytes(), USER, NICE, SYSTEM, IRQ, SOFTIRQ)


def seconds(stat: bytes, *columns: int) -> float:
    """Sum of ``columns``, of all processors, in what was read from ``STAT`` (its beginning will do)."""
    ticks = stat.split(b"\n", 1)[0].split()[1:]
    return sum(int(ticks[at]) for at in columns) / os.sysconf("SC_CLK_TCK")
