"""Sealing of sum slots (kernel-19): one batch update under the slots' locks. When it returns, nobody is adding.

Entry and exit counters instead of the lock are a race (tried); the lock costs 0.3 us a slot and is none anywhere.
"""

from __future__ import annotations

import numpy as np

from tailbound.errors import ConfigError
from tailbound.kernel import syscalls


class Sealer:
    """Writes ``sealed_op`` into the slots of the ``slot_locks`` map of descriptor ``fd``."""

    def __init__(self, fd: int, sum_rows: int) -> None:
        self._fd = fd
        self._rows = sum_rows
        self._keys = np.arange(sum_rows, dtype=np.uint32)
        self._values = np.zeros((sum_rows, 2), np.uint32)  # lock (left alone by the kernel), sealed_op

    def seal(self, op: int, seq: int, rows: int) -> None:
        """Seals ``rows`` slots from row sequence ``seq`` for ``op`` and everything older; wraps with the ring.

        Raises:
            ConfigError: more rows than the ring has.
        """
        if not 0 <= rows <= self._rows:
            raise ConfigError(f"{rows} rows to seal: give at most {self._rows}, as many as the ring has")
        self._values[:rows, 1] = op
        first = seq & (self._rows - 1)
        before_end = min(rows, self._rows - first)
        self._write(first, before_end)
        self._write(0, rows - before_end)

    def _write(self, first: int, count: int) -> None:
        if count:
            keys = self._keys.ctypes.data + 4 * first
            syscalls.map_update_batch(self._fd, keys, self._values.ctypes.data, count, syscalls.F_LOCK)
