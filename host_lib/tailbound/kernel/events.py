"""The consuming end of the event ring (kernel-22): a BPF ring buffer read through its mmapped pages.

Layout (Documentation/bpf/ringbuf.rst of the kernel): a page with the consumer's position, a page with the producer's,
then the data, mapped twice in a row so that no record is ever cut.
"""

from __future__ import annotations

import mmap
import platform
import struct

import numpy as np

from tailbound.kernel import barrier, syscalls

_BUSY, _DISCARD = 1 << 31, 1 << 30
_RECORD = struct.Struct("=IIQ")  # schema.EVENT: kind, op, ns
_HEAD = struct.Struct("=I")
#: Whether this processor reorders reads.
_REORDERS = platform.machine() not in ("x86_64", "s390x")


def _acquire() -> None:
    """What is read from here on is no older than what was read before."""
    if _REORDERS:
        barrier.full()


class EventRing:
    """Reads the ring of descriptor ``fd`` (which the caller keeps open; it is readable when there are events)."""

    def __init__(self, fd: int) -> None:
        size = syscalls.map_info(fd).entries
        self.fd = fd
        self._mask = size - 1
        self._own = mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._their = mmap.mmap(fd, mmap.PAGESIZE + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=mmap.PAGESIZE)
        self._consumed = np.frombuffer(self._own, np.uint64, 1)
        self._produced = np.frombuffer(self._their, np.uint64, 1)

    def drain(self) -> list[tuple[int, int, int]]:
        """Events since the last call as (kind, op, CLOCK_MONOTONIC in ns); never blocks.

        Where processors reorder reads, heads are read after the position that the kernel has written behind them, and
        records after their heads.
        """
        at, end = self._consumed.item(0), self._produced.item(0)
        if at >= end:
            return []
        _acquire()
        records = []
        while at < end:
            start = mmap.PAGESIZE + (at & self._mask)
            length = _HEAD.unpack_from(self._their, start)[0]
            if length & _BUSY:
                break
            if not length & _DISCARD:
                records.append(start + 8)
            at += (length & ~(_BUSY | _DISCARD)) + 8 + 7 & ~7
        _acquire()
        out = [_RECORD.unpack_from(self._their, start) for start in records]
        self._consumed[0] = at
        return out

    def close(self) -> None:
        """Unmaps the pages; may be called twice."""
        if hasattr(self, "_consumed"):
            del self._consumed, self._produced
            self._own.close()
            self._their.close()
