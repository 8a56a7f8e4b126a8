"""Processor time of the whole machine, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path

_TABLE = Path("/proc/stat")
#: Columns after the word ``cpu``: all that is work. What another guest of the same host takes (steal) is none of ours.
_USER, _NICE, _SYSTEM, _IDLE, _IOWAIT, _IRQ, _SOFTIRQ = range(7)


def busy_seconds(table: Path = _TABLE) -> float:
    """Seconds that the processors have not been idle since the machine started, interrupts included."""
    columns = [int(word) for word in table.read_text().split("\n", 1)[0].split()[1:]]
    ticks = sum(columns[at] for at in (_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ))
    return ticks / os.sysconf("SC_CLK_TCK")
