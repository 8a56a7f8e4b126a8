"""The few C library calls that nogil code makes itself.

Symbols are resolved in the running process, so nothing is linked or compiled but numba's own code. Layouts of what they
take are those of 64-bit little-endian Linux, the only kind the project runs on (``SUPPORTED``).
"""

from __future__ import annotations

import struct
import sys
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from tailbound.wire.jit import Scalar, cached, njit

SUPPORTED = sys.platform == "linux" and sys.byteorder == "little" and struct.calcsize("P") == 8

lock: Any = types.ExternalFunction("pthread_mutex_lock", types.int32(types.uintp))
unlock: Any = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.uintp))
poll: Any = types.ExternalFunction("poll", types.int32(types.uintp, types.uint64, types.int32))
ppoll: Any = types.ExternalFunction("ppoll", types.int32(types.uintp, types.uint64, types.uintp, types.uintp))
_Int: Any = types.CPointer(types.int32)  # type: ignore[no-untyped-call]
errno_location: Any = types.ExternalFunction("__errno_location", _Int())
recvmmsg: Any = types.ExternalFunction(
    "recvmmsg", types.int32(types.int32, types.uintp, types.uint32, types.int32, types.uintp)
)
sendto: Any = types.ExternalFunction(
    "sendto", types.int64(types.int32, types.uintp, types.uint64, types.int32, types.uintp, types.uint32)
)
write: Any = types.ExternalFunction("write", types.int64(types.int32, types.uintp, types.uint64))
clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))


class Mutex:
    """A pthread mutex in memory of its own, at ``address``. Only nogil code takes it.

    Python that held it would wait for the GIL with it, and the receiver for Python.
    """

    def __init__(self) -> None:
        self.words = np.zeros(8, np.uint64)  # PTHREAD_MUTEX_INITIALIZER is all zero on Linux; 40 bytes are used
        self.address = self.words.ctypes.data


@cached
@njit(nogil=True, cache=True)
def fence(mutex: Scalar) -> None:
    """Returns when nobody holds ``mutex`` (an address) any more that held it before: what was written there is seen."""
    lock(mutex)
    unlock(mutex)


@cached
@njit(nogil=True, cache=True)
def write_under(mutex: Scalar, to: NDArray[Any], values: Any) -> None:
    """Writes ``values``, an array or one value for all of ``to``, with ``mutex`` held."""
    lock(mutex)
    to[:] = values
    unlock(mutex)
