"""The 64-bit tag that takes the place of the check where a job has a key: who lacks the key can make none.

A universal hash over header and payload (auth-1), closed by SipHash-2-4 (Aumasson and Bernstein, INDOCRYPT 2012) over
the row's place and the hash. The hash is NH (Black et al., CRYPTO 1999, section 4) with one addition of 64 bits in the
place of two of 32: with x = word + key modulo 2^64 it sums x * (x >> 32). Two messages of one length have hashes with a
given difference for at most 2^-31 of all keys: where the lower halves of a word differ, the sum is linear in the upper
half of its key, with two cases of carry and one solution at most in each; where only the upper halves differ, it is
linear in the lower half.

What the tag covers as its own length stands in the place of the field ``check``, the header's last word. A key is an
array of words: SipHash's two, the header's bit of the key's epoch as it stands in the header's first word, one for each
word of the header, and one for each word of a row. An empty one stands for no key: then packets carry the check.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.wire.jit import njit
from tailbound.wire.schema import HEADER_BYTES, KEY_WORDS, Flag

#: No key: packets carry the check.
NO_KEY: NDArray[np.uint64] = np.zeros(0, np.uint64)
#: Where the header's words and a row's begin in a key.
HEAD_AT = KEY_WORDS - HEADER_BYTES // 8
#: The epoch's flag in the first word of a header, read as a little-endian word: flags are its bytes 2 and 3.
EPOCH_BIT = int.from_bytes(bytes(2) + int(Flag.EPOCH).to_bytes(2, "big"), "little")


def key_of(secret: bytes, epoch: int) -> NDArray[np.uint64]:
    """The key that ``secret`` (16 bytes for SipHash, 64 for the header, the rest for rows) stands for.

    Raises:
        ValueError: not so many bytes.
    """
    if len(secret) < 8 * (KEY_WORDS - 1) or len(secret) % 8:
        raise ValueError(f"a secret of {len(secret)} bytes: give 80 and a multiple of 8 for rows")
    words = np.frombuffer(secret, "<u8")
    return np.concatenate([words[:2], [np.uint64(EPOCH_BIT * (epoch & 1))], words[2:]]).astype(np.uint64)


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def hashed(words: NDArray[np.uint64], key: NDArray[np.uint64], at: np.uint64) -> np.uint64:
    """The hash of ``words`` (u64[n], little endian) under the words of ``key`` from ``at`` on.

    Unsigned indices: with signed ones numba asks for every word whether its index is negative.
    """
    total = np.uint64(0)
    for i in range(np.uint64(words.shape[0])):
        x = words[i] + key[np.uint64(at) + np.uint64(i)]
        total += x * (x >> np.uint64(32))
    return total
