"""membarrier(2) waits for XDP programs that are at work."""

from __future__ import annotations

import ctypes
import platform
import time

_NUMBERS = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "loongarch64": 283, "s390x": 356, "ppc64le": 365}
_NUMBER, _GLOBAL = _NUMBERS.get(platform.machine()), 1
#: More seconds than a program takes for a packet.
_LONG = 0.05
_libc = ctypes.CDLL(None)
_libc.syscall.restype = ctypes.c_long


def grace_period() -> None:
    """Returns when every XDP program that was at a packet is through with it: an RCU grace period, some 10 ms.

    Programs run inside RCU read-side sections, and the kernel's GLOBAL is ``synchronize_rcu``. That is how Linux does
    it, not what membarrier(2) promises; an update of a map of maps promises it, and needs privileges a job lacks. Where
    cores run without a tick (nohz_full) the kernel refuses, and some time passes instead.
    """
    if _NUMBER is None or _libc.syscall(_NUMBER, _GLOBAL, 0, 0) < 0:
        time.sleep(_LONG)
