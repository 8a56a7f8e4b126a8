"""The few C library calls that nogil code makes itself.

Symbols are resolved in the running process, so nothing is linked or compiled but numba's own code. Layouts of what they
take are those of 64-bit little-endian Linux, the only kind the project runs on (``SUPPORTED``).
"""

from __future__ import annotations

import struct
import sys
from typing import Any

from numba import types

SUPPORTED = sys.platform == "linux" and sys.byteorder == "little" and struct.calcsize("P") == 8

poll: Any = types.ExternalFunction("poll", types.int32(types.uintp, types.uint64, types.int32))
ppoll: Any = types.ExternalFunction("ppoll", types.int32(types.uintp, types.uint64, types.uintp, types.uintp))
_Int: Any = types.CPointer(types.int32)  # type: ignore[no-untyped-call]
errno_location: Any = types.ExternalFunction("__errno_location", _Int())
sendto: Any = types.ExternalFunction(
    "sendto", types.int64(types.int32, types.uintp, types.uint64, types.int32, types.uintp, types.uint32)
)
clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))
