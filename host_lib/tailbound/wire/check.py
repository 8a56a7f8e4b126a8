"""The 64-bit check over payload and header: a two-lane Fletcher sum of 64-bit words, mixed at the end.

XDP sees no UDP checksum (and on veth none is even computed), so every packet carries a check of its own, made in the
encode pass and verified in the kernel before anything is added. Two lanes keep the dependency chain at one addition
per word; the second-order sums ``b`` make it sensitive to position, so that a stuck bit column, which a plain sum
misses, is seen. ``K3`` and ``K4`` are even on purpose: a changed word at weight m contributes ``d * (K1 + m * K3)``,
and an odd factor is never lost modulo 2**64.

Every change within one word is seen. Its limit: carries only run upwards, so changes confined to the top bytes of two
words can cancel (about 1 in 256 of such pairs). It is a check against damage and strays, not a MAC.

Payload first, header last: headers can change (marks, deadlines) without reading the payload again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.wire.jit import njit

K1 = 0x9E3779B97F4A7C15
K2 = 0xC2B2AE3D27D4EB4F
K3 = 0x2E8A5C3D4B7F9D62
K4 = 0x58F1A6B5D3C4E792


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def partial(words: NDArray[np.uint64], state: NDArray[np.uint64]) -> None:
    """The sums of ``words`` (u64[2m], little endian) to ``state`` (u64[4]: a0, b0, a1, b1).

    Each ``b`` as products, so that no addition waits for the one before: the loop becomes vectors.
    """
    a0 = b0 = a1 = b1 = np.uint64(0)
    pairs = words.shape[0] // 2
    for i in range(pairs):
        weight = np.uint64(pairs - i)
        a0 += words[2 * i]
        b0 += weight * words[2 * i]
        a1 += words[2 * i + 1]
        b1 += weight * words[2 * i + 1]
    state[0] = a0
    state[1] = b0
    state[2] = a1
    state[3] = b1
