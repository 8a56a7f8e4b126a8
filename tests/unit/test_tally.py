"""Counting over slot records, presence and result records; expectations are written as one word."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from tailbound.collective.tally import gather_results, read_records, rows_by_rank, write_expect
from tailbound.wire.expect import expect_word
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import EXPONENT_NONE, Flag

COOKIE, OP = 0xABCD, 1 << 31 | 5


def test_rows_by_rank_counts_only_records_of_this_op() -> None:
    slots = np.zeros(16, DTYPES["tb_slot"])
    for at, op, cookie, ranks in [(14, OP, COOKIE, [1, 70]), (15, OP, COOKIE, [1]), (0, OP - 1, COOKIE, [1, 2]),
                                  (1, OP, COOKIE + 1, [2]), (2, OP, COOKIE, [255])]:  # fmt: skip
        slots[at]["op"], slots[at]["cookie"] = op, cookie
        for rank in ranks:
            slots[at]["ranks"][rank >> 6] |= np.uint64(1 << (rank & 63))
    out = np.full(256, 99, np.int64)
    rows_by_rank(slots, 14, 5, 15, COOKIE, OP, out)
    assert {rank: int(n) for rank, n in enumerate(out) if n} == {1: 2, 70: 1, 255: 1}
    rows_by_rank(slots, 0xFFFFFFFE, 1, 15, COOKIE, OP, out)  # a sequence that is about to wrap
    assert {rank: int(n) for rank, n in enumerate(out) if n} == {1: 1, 70: 1}


def test_gather_results_points_at_rows_and_leaves_the_own_alone() -> None:
    presence = np.zeros(8, DTYPES["tb_presence"])
    owner = np.array([0, 1, 2, 0, 1, 2], np.uint8)
    tags = [(OP, COOKIE), (OP, COOKIE), (OP - 1, COOKIE), (0, 0), (OP, COOKIE + 1), (OP, COOKIE)]
    for k, (op, cookie) in enumerate(tags):
        presence[(6 + k) % 8]["op"], presence[(6 + k) % 8]["cookie"] = op, cookie
    source = np.full(6, -77, np.int64)
    by_owner = np.full(3, 9, np.int64)
    assert gather_results(presence, 6, COOKIE, OP, owner, 0, source, by_owner) == 2
    np.testing.assert_array_equal(source, [-77, 7, -1, -77, -1, 3])
    np.testing.assert_array_equal(by_owner, [0, 1, 1])


def test_read_records_takes_out_what_was_overwritten() -> None:
    """Rule: kernel-20."""
    records = np.zeros(4, DTYPES["tb_result"])
    records[0]["op"], records[0]["count"], records[0]["scale"], records[0]["exponent"] = OP, 3, np.float32(0.5), -12
    records[1]["op"], records[1]["count"] = OP + 1024, 3  # the ring came round
    records[2]["op"], records[2]["count"] = OP, 0
    records[3]["op"], records[3]["count"], records[3]["flags"] = OP, 3, Flag.SWITCHED
    scale_dtype = records["scale"].dtype
    source = np.array([0, 1, 2, -1, -2, 3], np.int64)
    scale, exponent = np.full(6, 7, np.float32), np.full(6, 42, np.int16)
    assert read_records(records, source, OP, scale, exponent, 0, 4, None) == 3
    np.testing.assert_array_equal(source, [0, -1, -1, -1, -2, -1])
    np.testing.assert_array_equal(exponent, [-12, EXPONENT_NONE, EXPONENT_NONE, EXPONENT_NONE, 42, EXPONENT_NONE])
    assert scale_dtype == np.float32
    assert scale[0] == np.float32(0.5)
    assert scale[4] == 7


def test_read_records_of_a_switch_takes_one_form_only_and_says_who_contributed() -> None:
    """Rules: kernel-20, clock-28."""
    records = np.zeros(4, DTYPES["tb_result"])
    records["op"], records["count"], records["flags"] = (
        OP,
        [3, 4, 5, 2],
        [Flag.SUMS, Flag.SUMS, Flag.SUMS, Flag.SWITCHED],
    )
    source, count = np.array([0, 1, 2, 3, -1], np.int64), np.full(5, 9, np.uint16)
    scale, exponent = np.zeros(5, np.float32), np.zeros(5, np.int16)
    assert read_records(records, source, OP, scale, exponent, int(Flag.SUMS), 4, count) == 2
    np.testing.assert_array_equal(source, [0, 1, -1, -1, -1])
    np.testing.assert_array_equal(count, [3, 4, 0, 0, 0])


OPS, EXPONENTS = (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF), (0, 3, -3, 32767, -32767)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_the_word_is_the_struct(op: int, exponent: int) -> None:
    word = expect_word(op, exponent)
    record = np.array([word], np.uint64).view(DTYPES["tb_expect"])[0]
    assert record.tolist() == (op, exponent, 1)


def test_slots_by_group_over_the_end_of_the_ring() -> None:
    expect = np.zeros(8, DTYPES["tb_expect"])
    groups, exponents = np.array([0, 1, 2, 0], np.int32), np.array([-5, EXPONENT_NONE, 7], np.int16)
    write_expect(expect.view(np.uint64), 6, 7, 77, groups, exponents)
    assert expect["op"].tolist() == [77, 77, 0, 0, 0, 0, 77, 77]
    assert expect["valid"].tolist() == [1, 1, 0, 0, 0, 0, 1, 0]
    assert expect["exponent"][[0, 1, 6]].tolist() == [7, -5, -5]


@njit(nogil=True)
def _write(expect, state, groups, first, second):  # type: ignore[no-untyped-def]
    """Two ops in turn, each with an exponent of its own, until a reader has seen enough."""
    while state[0] == 0:
        write_expect(expect, 0, 0, 1, groups, first)
        write_expect(expect, 0, 0, 2, groups, second)
        state[1] += 1


@njit(nogil=True)
def _read(expect, state, words, most):  # type: ignore[no-untyped-def]
    """Times that a word was neither of those that are written; until both were seen, or (``most``) for long."""
    torn = 0
    seen = np.zeros(2, np.int64)
    for _ in range(most):
        word = expect[0]
        seen[0] += word == words[0]
        seen[1] += word == words[1]
        torn += (word != words[0]) & (word != words[1])
        if min(seen[0], seen[1]) > 100_000:
            break
    state[0] = 1
    return torn


def test_nobody_sees_half_of_one() -> None:
    """A packet would meet the new exponent under the old label, and be refused for it (kernel-20)."""
    groups = np.zeros(1, np.int32)
    first, second = np.array([11], np.int16), np.array([-22], np.int16)
    expect: NDArray[np.uint64] = np.array([expect_word(1, 11)], np.uint64)
    words = np.array([expect_word(1, 11), expect_word(2, -22)], np.uint64)
    stopped = np.array([1, 0], np.int64)
    _write(expect, stopped, groups, first, second)  # compiles
    _read(expect, stopped, words, 1)
    state = np.zeros(2, np.int64)
    writer = threading.Thread(target=_write, args=(expect, state, groups, first, second))
    writer.start()
    torn = _read(expect, state, words, 200_000_000)
    writer.join()
    assert torn == 0
    assert state[1] > 0
