"""Processor time that the kernel spends on packets and charges to no rank.

A packet over veth is taken in, by the XDP program or by TCP, where it was sent: as a rule within the sender's system
call, and then it is in the time of the sender's thread. In no rank's time are

- ``ksoftirqd`` and the kernel's NAPI threads, which take over when there is too much, and
- interrupts on a processor that has nothing else to do, such as the timers that let packets through a link with a rate:
  time in which a processor was not idle, and ran no thread either.

A kernel that accounts interrupts apart from threads (CONFIG_IRQ_TIME_ACCOUNTING) takes all of them out of the threads'
time; there it is the column of softirqs in /proc/stat.
"""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path

#: Kernel threads that do softirqs.
_KSOFTIRQD, _NAPI = "ksoftirqd/", "napi/"
_STAT = Path("/proc/stat")
#: Columns after the word ``cpu``. What another guest of the same host takes (steal) is none of ours.
USER, NICE, SYSTEM, IDLE, IOWAIT, IRQ, SOFTIRQ, STEAL = range(8)
#: Nanoseconds that the machine's threads ran: by processor, in a column, with what a hypervisor took from them; or in
#: all, without that.
_RUNS, _RAN = Path("/proc/schedstat"), 7
_USAGE = Path("/sys/fs/cgroup/cpuacct/cpuacct.usage")
_CONFIG, _ACCOUNTED = Path("/proc/config.gz"), b"CONFIG_IRQ_TIME_ACCOUNTING=y"


def busy_seconds(table: Path = _STAT) -> float:
    """Seconds that the processors have not been idle since the machine started, interrupts included."""
    return seconds(table.read_bytes(), USER, NICE, SYSTEM, IRQ, SOFTIRQ)


def seconds(stat: bytes, *columns: int) -> float:
    """Sum of ``columns``, of all processors, in what was read from ``_STAT`` (its beginning will do)."""
    ticks = stat.split(b"\n", 1)[0].split()[1:]
    return sum(int(ticks[at]) for at in columns) / os.sysconf("SC_CLK_TCK")


def softirqs_apart() -> bool:
    """Whether this kernel keeps softirqs out of the time of the thread that they interrupt.

    Raises:
        OSError: its configuration cannot be read here.
    """
    if _CONFIG.exists():
        return _ACCOUNTED in gzip.decompress(_CONFIG.read_bytes())
    return _ACCOUNTED in Path(f"/boot/config-{os.uname().release}").read_bytes()


class KernelShare:
    """Reads that time: of the whole machine, so that whoever else uses a network at the same time is in it.

    Raises:
        OSError: this kernel does not say, or not to this process.
    """

    def __init__(self) -> None:
        self._files: list[int] = []
        self._cpus = os.cpu_count() or 1
        try:
            self._apart = softirqs_apart()
            self._helpers = [self._open(path) for path in helpers(apart=self._apart)]
            self._stat = self._open(_STAT)
            if not self._apart:
                self._by_processor = _RUNS.exists()
                self._else = (IDLE, IOWAIT) if self._by_processor else (IDLE, IOWAIT, STEAL)
                self._runs = self._open(_RUNS if self._by_processor else _USAGE)
        except BaseException:
            self.close()
            raise

    def seconds(self) -> float:
        """Since some moment, in hundredths of a second; takes some 40 us."""
        helped = sum(int(os.pread(fd, 100, 0).split()[0]) for fd in self._helpers) / 1e9
        stat = os.pread(self._stat, 200, 0)
        if self._apart:
            return helped + seconds(stat, SOFTIRQ)
        return helped + self._cpus * time.monotonic() - seconds(stat, *self._else) - self._threads()

    def _threads(self) -> float:
        """Seconds that the machine's threads ran."""
        text = os.pread(self._runs, 1 << 20, 0)
        if not self._by_processor:
            return int(text) / 1e9
        return sum(int(line.split()[_RAN]) for line in text.split(b"\n") if line.startswith(b"cpu")) / 1e9

    def _open(self, path: Path) -> int:
        self._files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return self._files[-1]

    def close(self) -> None:
        """Closes the files."""
        while self._files:
            os.close(self._files.pop())


def helpers(proc: Path = Path("/proc"), *, apart: bool) -> list[Path]:
    """Files that say how long the kernel threads that do softirqs ran; ``apart``: those not in the column of softirqs.

    Raises:
        OSError: no such thread is to be seen.
    """
    names = {path.parent / "schedstat": _name(path) for path in proc.glob("[0-9]*/comm")}
    found = [path for path, name in names.items() if name.startswith((_KSOFTIRQD, _NAPI))]
    if not found:
        raise OSError("no kernel thread is to be seen here")
    return [path for path in found if not (apart and names[path].startswith(_KSOFTIRQD))]


def _name(comm: Path) -> str:
    try:
        return comm.read_text()
    except OSError:  # it has ended
        return ""
