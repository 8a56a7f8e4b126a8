"""What a packet's last field holds: the check, or in a job with a key the tag. One place that chooses.

Both are made in two parts: a payload's when its codes are written, a header's just before it leaves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.wire import check
from tailbound.wire.jit import Scalar, cached, njit
from tailbound.wire.schema import KEY_WORDS
from tailbound.wire.tag import EPOCH_BIT, hashed, tag_of

_partial, _final = check.partial, check.final
_AT = np.uint64(KEY_WORDS)
_REST = np.uint64(EPOCH_BIT ^ (1 << 64) - 1)


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


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def proven(line: NDArray[np.uint64], state: NDArray[np.uint64], key: NDArray[np.uint64]) -> np.uint64:
    """The check or tag for the header ``line`` (u64[8]) and the payload that left ``state``; sets the epoch's flag."""
    if key.shape[0]:
        line[0] = (line[0] & _REST) | key[2]
        return tag_of(line, state[0], state[1], key)
    return _final(line, state)


@cached
@njit(nogil=True, cache=True, boundscheck=False)
def proof_of(packet: NDArray[np.uint8], key: NDArray[np.uint64]) -> Scalar:
    """What ``packet`` (u8[64 + payload], C-contiguous) ought to carry, as the integer in its last field.

    The epoch's flag is set in it.
    """
    state = np.zeros(4, np.uint64)
    absorb(packet[64:].view(np.uint64), state, key)
    return proven(packet[:64].view(np.uint64), state, key)
