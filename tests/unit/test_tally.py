"""Counting over slot records, presence and result records."""

from __future__ import annotations

import numpy as np

from tailbound.collective.tally import gather_results, read_records, rows_by_rank
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
    records[0]["op"], records[0]["count"], records[0]["scale"] = OP, 3, np.float32(0.5)
    records[1]["op"], records[1]["count"] = OP + 1024, 3  # the ring came round
    records[2]["op"], records[2]["count"] = OP, 0
    records[3]["op"], records[3]["count"], records[3]["flags"] = OP, 3, Flag.SWITCHED
    source = np.array([0, 1, 2, -1, -2, 3], np.int64)
    scale, exponent = np.full(6, 7, np.float32), np.full(6, 42, np.int16)
    assert read_records(records, source, OP, scale, exponent, 0, 4, None) == 3
    np.testing.assert_array_equal(source, [0, -1, -1, -1, -2, -1])
    assert (exponent == 42).all()  # that of ranks says nothing
    assert (scale[0], scale[4]) == (0.5, 7)


def test_read_records_of_a_switch_takes_one_form_only_and_says_who_contributed() -> None:
    """Rules: kernel-20, clock-28."""
    records = np.zeros(4, DTYPES["tb_result"])
    records["exponent"] = [-12, 5, 6, 7]
    records["op"], records["count"], records["flags"] = OP, [3, 4, 5, 2], [Flag.SUMS] * 3 + [Flag.SWITCHED]
    source, count = np.array([0, 1, 2, 3, -1], np.int64), np.full(5, 9, np.uint16)
    scale, exponent = np.zeros(5, np.float32), np.zeros(5, np.int16)
    assert read_records(records, source, OP, scale, exponent, int(Flag.SUMS), 4, count) == 2
    np.testing.assert_array_equal(source, [0, 1, -1, -1, -1])
    np.testing.assert_array_equal(count, [3, 4, 0, 0, 0])
    np.testing.assert_array_equal(exponent, [-12, 5, *3 * [EXPONENT_NONE]])
