"""The few C library calls that nogil code makes itself.

Symbols are resolved in the running process, so nothing is linked or compiled but numba's own code. Layouts of what they
take are those of 64-bit little-endian Linux, the only kind the project runs on (``SUPPORTED``).
"""

from __future__ import annotations

import ctypes
import struct
import sys
from typing import Any

import numpy as np
from numba import types

SUPPORTED = sys.platform == "linux" and sys.byteorder == "little" and struct.calcsize("P") == 8

lock: Any = types.ExternalFunction("pthread_mutex_lock", types.int32(types.uintp))
unlock: Any = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.uintp))
poll: Any = types.ExternalFunction("poll", types.int32(types.uintp, types.uint64, types.int32))
recvmmsg: Any = types.ExternalFunction(
    "recvmmsg", types.int32(types.int32, types.uintp, types.uint32, types.int32, types.uintp)
)
sendto: Any = types.ExternalFunction(
    "sendto", types.int64(types.int32, types.uintp, types.uint64, types.int32, types.uintp, types.uint32)
)
write: Any = types.ExternalFunction("write", types.int64(types.int32, types.uintp, types.uint64))
clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))

_libc = ctypes.CDLL(None, use_errno=True)


class Mutex:
    """A pthread mutex in memory of its own, taken by nogil code and by Python alike (which drops the GIL to wait)."""

    def __init__(self) -> None:
        self.words = np.zeros(8, np.uint64)  # PTHREAD_MUTEX_INITIALIZER is all zero on Linux; 40 bytes are used
        self._pointer = ctypes.c_void_p(self.words.ctypes.data)

    def __enter__(self) -> None:
        _libc.pthread_mutex_lock(self._pointer)

    def __exit__(self, *_: object) -> None:
        _libc.pthread_mutex_unlock(self._pointer)
