"""Where events come from (kernel-22). A BPF ring buffer is read by the library, through its mmapped pages.

Layout (Documentation/bpf/ringbuf.rst of the kernel): a page with the consumer's position, a page with the producer's,
then the data, mapped twice in a row so that no record is ever cut.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np

from tailbound.kernel import syscalls
from tailbound.kernel.core import Core, address, core
from tailbound.wire.packets import DTYPES, record_of
from tailbound.wire.schema import SOURCE

#: Events that are taken at once: more than a ring has.
_MOST = 4096
#: Control packets that are taken at once.
_HELPING = 256


class Source(record_of(SOURCE)):  # type: ignore[misc]
    """Where events come from, and who seals (``tb_source``).

    Attributes:
        library: that the tables are of; None: ``core.core``.
    """

    library: Core | None = None

    def seal(self, op: int, seq: int, rows: int) -> None:
        """Seals ``rows`` slots from row sequence ``seq`` for ``op`` and everything older (kernel-19).

        It does so under their locks: when it returns, nobody is adding. Entry and exit counters instead are a race
        (tried).

        Raises:
            OSError: more rows than the ring has, or the map may not be written.
        """
        if error := (self.library or core()).fast.tb_seal_rows(self.pointer, int(op), int(seq), int(rows)):
            raise OSError(error, os.strerror(error))

    def take(self, fd: int = -1) -> list[tuple[int, int, int]]:
        """Events since the last call as (kind, op, CLOCK_MONOTONIC in ns); never blocks.

        Args:
            fd: an eventfd that is clear afterwards; -1: none.
        """
        taken = np.empty(_MOST, DTYPES["tb_event"])
        count = core().fast.tb_take(self.pointer, fd, taken.ctypes.data, len(taken))
        found: list[Any] = taken[:count].tolist()
        return found

    def words(self, room: int, most: int = _HELPING) -> list[bytes]:
        """A helping of control packets, of at most ``room`` bytes, whose senders are where ranks are (kernel-8)."""
        library = self.library or core()
        out, found = ctypes.create_string_buffer(room), []
        for _ in range(most):  # the rest stays readable: ops go on between two helpings of a flood
            if not (size := library.fast.tb_take_word(self.pointer, out, room)):
                break
            if size > 0:
                found.append(out.raw[:size])
        return found

    @property
    def pointer(self) -> int:
        """Its address."""
        return ctypes.addressof(self)


class EventRing(Source):
    """The kernel's ring and locks; the caller keeps their descriptors open.

    Args:
        fd: of the ring; readable when there are events.
        locks: of the map ``slot_locks``; -1: nothing is sealed.
        sum_rows: slots.
    """

    def __init__(self, fd: int, locks: int = -1, sum_rows: int = 0) -> None:
        size = syscalls.map_info(fd).entries
        self._own = mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._their = mmap.mmap(fd, mmap.PAGESIZE + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=mmap.PAGESIZE)
        own, their = (np.frombuffer(pages, np.uint8).ctypes.data for pages in (self._own, self._their))
        self._slots = np.arange(sum_rows, dtype=np.uint32), np.zeros((sum_rows, 2), np.uint32)
        slots = map(address, self._slots)
        super().__init__(0, own, their, their + mmap.PAGESIZE, size - 1, *slots, sum_rows, locks)

    def close(self) -> None:
        """Unmaps the pages; may be called twice."""
        self._own.close()
        self._their.close()
