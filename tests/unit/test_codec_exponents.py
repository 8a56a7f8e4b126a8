"""Which exponents tensors get, and the table that ranks agree on (codec-18)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.codec.balance import EVEN, EXPONENT_MOST
from tailbound.codec.balance_table import NO_TABLE, Table, Tables, decode_table, digest_of
from tailbound.codec.exponents import BLOCK, are_off, ends_of, merged, rounded, sizes_of, wanted

ENDS = np.array([1000, 1010, 2000], np.int64)


def test_tensors_and_blocks() -> None:
    assert ends_of((), 0, 100).tolist() == [100]
    assert ends_of((0, 10, 40), 0, 100).tolist() == [10, 40, 100]
    assert ends_of((0, 10, 40, 100), 10, 50).tolist() == [30, 50]
    assert ends_of((), 0, 3 * BLOCK + 1).tolist() == [(3 * BLOCK + 1) * i // 4 for i in (1, 2, 3, 4)]
    assert ends_of((0, 5), 0, 5 + 2 * BLOCK).tolist() == [5, 5 + BLOCK, 5 + 2 * BLOCK]


def test_a_tensor_gets_half_of_its_distance_and_all_that_is_far() -> None:
    apart = wanted(np.array([0.0, 0.0, -2.0]), np.array([10**6, 2 * 10**6, 2 * 10**6 + 1]))
    assert apart[:2] == pytest.approx(0, abs=1e-5)
    assert apart[2] == pytest.approx(-1, abs=1e-5)
    far = wanted(np.array([0.0, -6.0, 6.0]), np.array([10**6, 10**6 + 1, 10**6 + 2]))
    assert far == pytest.approx([0, -5, 5], abs=1e-3)


def test_nothing_is_known_of_zeros() -> None:
    """Tensors that are all zero, or not used, count as the mean, and keep what they had when they become zero."""
    sizes = sizes_of(np.array([1.0, 0.0, 1.0]))
    assert sizes[0] == sizes[2] == 0
    assert np.isnan(sizes[1])
    assert not wanted(sizes, ENDS).any()
    assert not wanted(sizes_of(np.zeros(3)), ENDS).any()
    assert merged(np.array([1.0, np.nan, 3.0, np.nan]), np.array([2.0, 5.0, np.nan, np.nan]), 0.5)[:3].tolist() == [
        1.5, 5.0, 3.0,
    ]  # fmt: skip


@given(st.lists(st.floats(-140, 120), min_size=1, max_size=30))
def test_exponents_are_small_whole_numbers_and_not_off(sizes: list[float]) -> None:
    ends = np.cumsum(np.arange(1, len(sizes) + 1)).astype(np.int64)
    wish = wanted(np.array(sizes), ends)
    exponents = rounded(wish)
    assert exponents.min() == 0
    assert exponents.max() <= EXPONENT_MOST
    assert not are_off(exponents, wish, ends)
    assert not are_off(exponents, wish + 7.25, ends)


def test_a_tensor_that_is_a_thousand_times_larger_is_off() -> None:
    sizes = np.zeros(3)
    exponents = rounded(wanted(sizes, ENDS))
    assert not are_off(exponents, wanted(np.array([0.0, 1.5, 0.0]), ENDS), ENDS)
    assert are_off(exponents, wanted(np.array([0.0, 10.0, 0.0]), ENDS), ENDS)


def test_a_table_and_its_bytes() -> None:
    table = Table({(0, 2000, 0): (ENDS, np.array([3, 3, 0], np.uint8)), (1, 5, 0): (ENDS[:1], np.zeros(1, np.uint8))})
    data = table.encode()
    tables = Tables()
    digest = tables.add(data)
    assert digest == digest_of(data) != NO_TABLE
    assert tables.encoded(digest) == data == decode_table(data).encode()
    ranges = tables.ranges(digest, (0, 2000, 0), 2000)
    assert ranges.ends.tolist() == [1010, 2000]  # neighbours that are equal are one
    assert ranges.down.tolist() == [0.125, 1]
    assert ranges.up.tolist() == [8, 1]
    assert tables.ranges(digest, (0, 2000, 0), 1999) is EVEN  # codes of other bits cut a bucket elsewhere
    assert tables.ranges(digest, (1, 5, 0), 1000) is EVEN
    assert tables.ranges(digest, (9, 9, 9), 5) is EVEN
    assert tables.ranges(NO_TABLE, (0, 2000, 0), 2000) is EVEN
    tables.keep({NO_TABLE})
    assert not tables.knows(digest)
    with pytest.raises(KeyError):
        tables.ranges(digest, (0, 2000, 0), 2000)
    for wrong in (data[:-1], data[:7], bytes(16), data[:-1] + bytes([25])):
        with pytest.raises(ValueError, match="exponents"):
            decode_table(wrong)
