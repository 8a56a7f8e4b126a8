"""The scale exponents that ranks agree on without a round trip (CODEC.md rule 5)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.scale import headroom_of
from tailbound.wire.schema import EXPONENT_NONE

#: Exponent of a group in which nobody has seen anything but zeros: 2**(-200/4). What comes later clips once, and the
#: result that follows carries the need; agreeing anew in every op of a dead group would cost a round trip each time.
EXPONENT_ZERO = -200


def cold_exponents(needs: list[NDArray[np.int16]], ranks: int) -> NDArray[np.int16]:
    """e of every group from all ranks' needs (i16[groups] each), own included."""
    largest = np.max(np.stack(needs), axis=0).astype(np.int32)
    return np.where(largest == EXPONENT_NONE, EXPONENT_ZERO, largest + headroom_of(ranks)).astype(np.int16)


def warm_exponents(row_exponents: NDArray[np.int16], groups: int) -> NDArray[np.int16]:
    """e of every group for the key's next op: the largest over its result rows, EXPONENT_NONE where none came.

    Args:
        row_exponents: i16[groups * R], EXPONENT_NONE for rows that did not arrive.
    """
    largest: NDArray[np.int16] = row_exponents.reshape(groups, -1).max(axis=1)
    return largest
