"""The payload's part of what a packet's last field holds: the check, or in a job with a key the tag.

It is made when codes are written. The library makes the header's part just before a packet leaves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.wire import check
from tailbound.wire.jit import njit
from tailbound.wire.schema import KEY_WORDS
from tailbound.wire.tag import hashed

_partial = check.partial
_AT = np.uint64(KEY_WORDS)


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def absorb(words: NDArray[np.uint64], state: NDArray[np.uint64], key: NDArray[np.uint64]) -> None:
    """A whole payload into ``state`` (u64[4], zero before): the check's sums, or the hash and the payload's bytes.

    Args:
        words: u64[2m], little endian.
        key: of ``wire.tag``; an empty one for the check.
    """
    if key.shape[0]:
        state[0] = hashed(words, key, _AT)
        state[1] = np.uint64(8 * words.shape[0])
    else:
        _partial(words, state)
