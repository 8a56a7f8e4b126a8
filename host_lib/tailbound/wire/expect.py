"""What the host expects in a sum slot (``tb_expect``), as the one word in which it is written and read.

Field by field a packet could meet half of it: the new op's exponent under the old op's label.
"""

from __future__ import annotations

import sys

import numpy as np

from tailbound.wire.jit import Scalar, compiled
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import EXPONENT_NONE


def _shift(name: str) -> np.uint64:
    """By how many bits a field stands to the left in the word."""
    dtype, offset = DTYPES["tb_expect"].fields[name][:2]  # type: ignore[index]
    return np.uint64(8 * (offset if sys.byteorder == "little" else 8 - offset - dtype.itemsize))


_OP, _EXPONENT, _VALID = (_shift(name) for name in ("op", "exponent", "valid"))


@compiled
def expect_word(op: Scalar, exponent: Scalar) -> Scalar:
    """The word that says: contributions of ``op`` must carry ``exponent``; any, where that is ``EXPONENT_NONE``."""
    valid = np.uint64(exponent != EXPONENT_NONE)
    return np.uint64(op) << _OP | np.uint64(np.int64(exponent) & 0xFFFF) << _EXPONENT | valid << _VALID
