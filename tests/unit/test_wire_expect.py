"""Expectations are read and written as one word, and mean what the kernel's struct says."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from tailbound.collective.tally import write_expect
from tailbound.wire.expect import expect_word
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import EXPONENT_NONE

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
