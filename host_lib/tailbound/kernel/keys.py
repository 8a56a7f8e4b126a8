"""Keys into the map that programs read them from (auth-2). Nobody reads them back: the map's descriptors only write."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from tailbound.kernel import syscalls
from tailbound.wire.schema import KEY_EPOCHS


def put_key(fd: int, epoch: int, key: NDArray[np.uint64]) -> None:
    """``key`` (``wire.tag``, for rows of the program's width) is in force from now on, in the place of the one before.

    Raises:
        OSError: the map takes no such key, or may not be written.
    """
    syscalls.map_update(fd, struct.pack("=I", epoch % KEY_EPOCHS), key.tobytes())
