"""Which exponents tensors get, and the table that ranks agree on (codec-18)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailbound.codec.balance import EVEN, EXPONENT_MOST, ranges_of
from tailbound.codec.balance_table import NO_TABLE, Entry, Table, Tables, decode_table, digest_of
from tailbound.codec.encode import measure
from tailbound.codec.exponents import (
    BLOCK,
    are_off,
    changes,
    ends_of,
    merged,
    moved,
    moves,
    rounded,
    sizes_of,
    wanted,
)
from tailbound.codec.records import Coding
from tailbound.codec.scale import NEED_LEAST
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import shape_for
from tailbound.wire.schema import EXPONENT_NONE

ENDS = np.array([1000, 1010, 2000], np.int64)


def entry(ends: NDArray[np.int64], *exponents: int, before: int = NO_TABLE, moves: tuple[int, ...] = (4, -8)) -> Entry:
    """Of an op that is coded in mode 33."""
    return Entry(ends, np.array(exponents, np.uint8), before, 33, np.array(moves, np.int16))


def test_tensors_and_blocks() -> None:
    assert ends_of((), 0, 100).tolist() == [100]
    assert ends_of((0, 10, 40), 0, 100).tolist() == [10, 40, 100]
    assert ends_of((0, 10, 40, 100), 10, 50).tolist() == [30, 50]
    assert ends_of((), 0, 3 * BLOCK + 1).tolist() == [(3 * BLOCK + 1) * i // 4 for i in (1, 2, 3, 4)]
    assert ends_of((0, 5), 0, 5 + 2 * BLOCK).tolist() == [5, 5 + BLOCK, 5 + 2 * BLOCK]


def test_a_tensor_gets_half_of_its_distance_and_all_that_is_far() -> None:
    apart = wanted(np.array([0.0, 0.0, -2.0]), np.array([10**9, 2 * 10**9, 2 * 10**9 + BLOCK]))
    assert apart[:2] == pytest.approx(0, abs=1e-5)
    assert apart[2] == pytest.approx(-1, abs=1e-5)
    far = wanted(np.array([0.0, -6.0, 6.0]), np.array([10**9, 10**9 + BLOCK, 10**9 + BLOCK + 2]))
    assert far == pytest.approx([0, -5, 5], abs=1e-3)


def test_a_tensor_of_few_entries_far_below_the_mean_is_lifted_above_it() -> None:
    """To four times the mean: 2^(h - d) is what it is after."""
    few = np.array([10**9, 10**9 + 4096, 10**9 + 4096 + 64])
    assert wanted(np.array([0.0, -8.0, -8.0]), few) == pytest.approx([0, -8, -10], abs=1e-3)
    assert wanted(np.array([0.0, -4.0, -4.0]), few) == pytest.approx([0, -3.5, -4.5], abs=1e-3)
    assert wanted(np.array([0.0, 2.0, 2.0]), few) == pytest.approx([0, 1, 1], abs=1e-3)


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
    table = Table({(0, 2000, 0): entry(ENDS, 3, 3, 0), (1, 5, 0): entry(ENDS[:1], 0, before=7, moves=())})
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
    far, many = entry(ENDS, 3, 3, 0, moves=(4 * EXPONENT_MOST + 1,)), entry(ENDS, 0, EXPONENT_MOST + 1, 0)
    for wrong in (data[:-1], data[:7], bytes(29), *(Table({(0, 2000, 0): each}).encode() for each in (far, many))):
        with pytest.raises(ValueError, match="exponents"):
            decode_table(wrong)


def test_an_op_whose_exponents_stay_keeps_its_mark() -> None:
    """And with it its scales; other exponents are another mark, and so are the same ones after others."""
    tables, key, other = Tables(), (0, 2000, 0), (1, 2000, 0)
    first = entry(ENDS, 3, 3, 0)
    one = tables.add(Table({key: first}).encode())
    both = tables.add(Table({key: first, other: entry(ENDS, 0, 1, 0)}).encode())
    assert tables.mark(one, key, 2000) == tables.mark(both, key, 2000) != NO_TABLE
    assert tables.mark(one, other, 2000) == tables.mark(one, key, 1999) == tables.mark(NO_TABLE, key, 2000) == NO_TABLE
    mark = tables.mark(one, key, 2000)
    then = tables.add(Table({key: entry(ENDS, 0, 3, 0, before=mark)}).encode())
    back = tables.add(Table({key: first._replace(before=tables.mark(then, key, 2000))}).encode())
    assert len({tables.mark(each, key, 2000) for each in (one, then, back)}) == 3
    assert tables.marks({then}, key) == {NO_TABLE, mark, tables.mark(then, key, 2000)}
    assert tables.mark(77, key, 2000) == 77  # it is not here: nothing is carried on
    assert tables.entry(77, key, 2000) is None


def test_groups_change_by_what_their_entries_do() -> None:
    old, new = np.array([5, 0, 2], np.uint8), np.array([1, 4], np.uint8)
    least, most = changes((ENDS, np.array([1500, 2000])), (old, new), 500)
    assert least.tolist() == [4, 4, -1, -2]
    assert most.tolist() == [4, 4, 1, -2]


def test_scales_move_between_what_exponents_change_by() -> None:
    none, bounds = EXPONENT_NONE, (np.array([-2, -2, -2, -2], np.int16), np.array([1, 1, 1, 0], np.int16))
    before, after = np.array([0, 0, 10, none], np.int16), np.array([-3, 9, none, 7], np.int16)
    assert moves((before, after), bounds, 0).tolist() == [-3, 4, 0, 0]
    assert moves((before, after), bounds, 4).tolist() == [1, 4, 4, 0]
    scales, by = np.array([5, none, NEED_LEAST + 1], np.int16), np.array([-3, 4, -9], np.int16)
    assert moved(scales, by).tolist() == [2, none, NEED_LEAST]


@pytest.mark.parametrize("exponents", [(0, 0, 3), (4, 0, 1)])
def test_a_scale_moved_by_the_largest_change_is_too_small_at_most_twice_as_often(exponents: tuple[int, ...]) -> None:
    """The contraction principle, over the signs of many ops, for one gradient."""
    numel, ends, old = 1024, np.array([300, 310, 1024]), np.array([2, 5, 0], np.uint8)
    new = np.array(exponents, np.uint8)
    shape, scratch, need = shape_for(numel, 64), Scratch(64), np.zeros(1, np.int16)
    x = np.random.default_rng(3).standard_cauchy(numel).astype(np.float32)
    (_,), (most,) = changes((ends, ends), (old, new), numel)

    def needs(of: NDArray[np.uint8]) -> NDArray[np.int64]:
        found = []
        for seed in range(400):
            assert measure(x, shape, Coding(seed, ranges=ranges_of(ends, of)), need, scratch)
            found.append(int(need[0]))
        return np.array(found)

    before, after = needs(old), needs(new) - 4 * int(most)
    for scale in range(int(before.min()) - 1, int(before.max()) + 8):
        assert (after > scale).mean() <= 2 * (before > scale).mean()
