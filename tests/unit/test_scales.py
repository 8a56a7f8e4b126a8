"""Scales that ranks agree on without a round trip (codec-5)."""

from __future__ import annotations

import numpy as np
import pytest

from tailbound.codec.scale import NEED_LEAST, cold_exponents, headroom_of, next_exponent, shift_cap_of, warm_exponents
from tailbound.wire.schema import EXPONENT_NONE


@pytest.mark.parametrize(("ranks", "most"), [(2, 1), (32, 1), (33, 2), (64, 2), (65, 4)])
def test_cold_is_the_largest_need_and_headroom(ranks: int, most: int) -> None:
    headroom = headroom_of(ranks)
    assert headroom == most
    needs = [np.array([3, -40, EXPONENT_NONE, 7], np.int16), np.array([5, EXPONENT_NONE, EXPONENT_NONE, -7], np.int16)]
    np.testing.assert_array_equal(
        cold_exponents(np.stack(needs), headroom), [5 + headroom, -40 + headroom, NEED_LEAST + headroom, 7 + headroom]
    )


def test_a_group_of_zeros_has_a_scale() -> None:
    """Without one nobody would ever contribute to it."""
    (e,) = cold_exponents(np.full((3, 1), EXPONENT_NONE, np.int16), headroom_of(3))
    assert e != EXPONENT_NONE


def test_cold_does_not_overflow() -> None:
    assert cold_exponents(np.array([[480]], np.int16), headroom_of(256)).dtype == np.int16


def test_warm_is_the_largest_of_the_rows_that_came() -> None:
    none = EXPONENT_NONE
    rows = np.array([4, none, 6, none, none, none, none, none, -9, none, none, -11], np.int16)
    np.testing.assert_array_equal(warm_exponents(rows, np.arange(0, 13, 4)), [6, none, -9])


@pytest.mark.parametrize(
    ("ranks", "e", "need", "after"),
    [
        (4, 0, -40, -39),  # falls at once
        (4, 0, -1, 0),
        (4, 0, 0, 1),
        (4, 0, 10, 1),  # rises by a quarter of a doubling
        (4, 0, 40, 25),  # leaves two of the six shifts
        (32, 0, 10, 7),
        (64, 0, 10, 12),  # two shifts are all there are
        (4, EXPONENT_NONE, 10, 11),
        (4, NEED_LEAST + 1, 10, 11),  # nothing but zeros before
        (4, 7, EXPONENT_NONE, 7),
    ],
)
def test_scales_rise_slowly_where_shifts_will_do(ranks: int, e: int, need: int, after: int) -> None:
    """Rule: codec-10."""
    found = next_exponent(e, need, headroom_of(ranks), shift_cap_of(ranks))
    assert found == after
    assert need == EXPONENT_NONE or need <= found + 4 * shift_cap_of(ranks)
