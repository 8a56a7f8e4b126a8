"""membarrier(2): PRIVATE_EXPEDITED is a full memory barrier (kernel-20) in microseconds, GLOBAL waits for programs."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time

from tailbound.errors import CapabilityError

_NUMBERS = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "loongarch64": 283, "s390x": 356, "ppc64le": 365}
_GLOBAL, _PRIVATE_EXPEDITED, _REGISTER = 1, 1 << 3, 1 << 4
_NUMBER = _NUMBERS.get(platform.machine())
#: More seconds than a program takes for a packet.
_LONG = 0.05
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _membarrier(command: int) -> None:
    if _NUMBER is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _libc.syscall(_NUMBER, command, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def register() -> None:
    """Once per process, before the first ``full``.

    Raises:
        CapabilityError: this kernel has no membarrier.
    """
    try:
        _membarrier(_REGISTER)
    except OSError as error:
        raise CapabilityError(f"membarrier(2) is unavailable ({error}): use the udp datapath") from error


def full() -> None:
    """Orders all memory accesses before the call against all after it, here and on CPUs that run this process."""
    _membarrier(_PRIVATE_EXPEDITED)


def grace_period() -> None:
    """Returns when every XDP program that was at a packet is through with it: an RCU grace period, some 10 ms.

    Programs run inside RCU read-side sections, and the kernel's GLOBAL is ``synchronize_rcu``. That is how Linux does
    it, not what membarrier(2) promises; an update of a map of maps promises it, and needs privileges a job lacks.
    """
    try:
        _membarrier(_GLOBAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        time.sleep(_LONG)  # where cores run without a tick (nohz_full) the kernel refuses
