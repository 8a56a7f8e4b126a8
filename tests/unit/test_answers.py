"""Rows that other ranks request, and what they are sent (clock-23; ``host_lib/core/answers.c``)."""

from __future__ import annotations

import ctypes
import errno
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answer_world import PACE, RANKS, TAG, Answers, bits_of, named
from queue_world import STRIDE
from tailbound.kernel.core import core
from tailbound.transport.config import MS
from tailbound.transport.sockets import UdpSocket
from tailbound.wire.schema import PacketType, op_label
from tailbound.wire.tag import NO_KEY

#: Bytes that are saved up for a rank; parts of the pace for contributions and results; requests that are kept.
DEPTH, CONTRIBUTIONS, RESULTS, MOST = 256 << 10, 0.1, 0.5, 1024


@pytest.fixture
def rank(bound: UdpSocket) -> Answers:
    return Answers(bound)


@pytest.mark.parametrize(
    ("requests", "answered"),
    [
        # the newest op first, across the wrap
        ([(label, 1, (0,)) for label in (-3, 2, -1)], [(2, 1, [0]), (0xFFFFFFFF, 1, [0]), (0xFFFFFFFD, 1, [0])]),
        # of one op's, the first
        ([(6, asker, (0,)) for asker in (2, 1, 3)], [(6, 2, [0]), (6, 1, [0]), (6, 3, [0])]),
        # a request again adds to the first
        ([(1, 1, (1, 5)), (1, 1, (2, 5)), (1, 2, (9,))], [(1, 1, [1, 2, 5]), (1, 2, [9])]),
    ],
)
def test_what_is_answered(rank: Answers, requests: list[Any], answered: list[tuple[int, int, list[int]]]) -> None:
    for label in {label for label, _, _ in requests}:
        rank.keep(label & 0xFFFFFFFF, 10)
    assert all(rank.ask(*request, 10) for request in requests)
    assert (rank.answer(), rank.sent()) == ([], answered)
    assert (rank.voice.waiting, rank.voice.again, rank.line.queue.empty) == (0, 0, True)


def test_answers_leave_before_all_that_waits(rank: Answers) -> None:
    """Rule: clock-17."""
    rank.keep(1, 10)
    rank.line.kernel.always = errno.EAGAIN
    rank.line.submit(7, PacketType.RESULT, (1, 4), (3, 5))
    assert (rank.ask(1, 2, (3, 4), 10), rank.answer(), rank.line.taken) == (True, [], [])
    rank.line.go()
    assert rank.line.taken == [(2, 2), (1, 4), (3, 5)]


def test_of_too_many_requests_those_of_the_oldest_op_are_forgotten(rank: Answers) -> None:
    for label in (*range(5, MOST + 5), 1, MOST + 5):
        assert rank.ask(label, 1, (0,), 10)
    assert (rank.voice.waiting, [op for op, _, _ in rank.answer()]) == (MOST, list(range(MOST + 5, 5, -1)))


def test_contributions_are_found_by_their_place_and_results_once_they_were_handed_out(rank: Answers) -> None:
    """Senders begin in the middle of a list."""
    op = rank.enter()
    shares, tag = op.place.placement.shares, op.place.tag
    assert op.buffers.firsts[2] != 0
    assert rank.ask(op.label, 2, (0, 1, shares[2] - 1), shares[2], half=True, tag=tag)
    assert (rank.answer(), rank.sent()) == ([], [(op.label, 2, [0, 1, shares[2] - 1])])
    for handed_out in (False, True):
        if handed_out:
            op.buffers.results.usable[:] = 1
            named(op.buffers.results.packets, op.label, np.arange(shares[0]))
            op.buffers.given.belong(op.place, NO_KEY)
            op.results = op.made
        assert rank.ask(op.label, 2, (3, 4), shares[0], tag=tag)
        assert rank.answer() == ([] if handed_out else [(op.label, 2, [3, 4])])
    assert rank.sent() == [(op.label, 2, [3, 4])]
    core().fast.tb_leave(rank.terms.pointer, ctypes.addressof(op))


@pytest.mark.parametrize(
    ("about", "gone"),
    [
        ({}, [2]),
        ({"label": 11}, [1, 2, 3]),  # of another op
        ({"tag": TAG + 1}, [1, 2, 3]),
        ({"rows": 9}, [1, 2, 3]),  # another list
        ({"half": True}, [1, 2, 3]),  # contributions of an op that is over
    ],
)
def test_rows_that_are_gone_are_told(rank: Answers, about: dict[str, Any], gone: list[int]) -> None:
    rank.keep(10, 10, lacking=(2,))
    assert rank.ask(**{"label": 10, "asker": 3, "places": (1, 2, 3), "rows": 10} | about)
    assert rank.answer() == [(about.get("label", 10), 3, gone)]
    assert (rank.sent(), rank.voice.waiting) == ([(10, 3, [1, 3])] if gone == [2] else [], 0)


def test_contributions_that_are_late_or_none_are_gone(rank: Answers) -> None:
    op = rank.enter(gives=False)
    shares, tag = op.place.placement.shares, op.place.tag
    assert (rank.ask(op.label, 1, (0,), shares[1], half=True, tag=tag), rank.answer()) == (True, [(op.label, 1, [0])])
    core().fast.tb_leave(rank.terms.pointer, ctypes.addressof(op))


@pytest.mark.parametrize("half", [True, False])
def test_answers_take_their_share_of_the_pace_and_hold_up_no_other_rank(rank: Answers, half: bool) -> None:
    rows, saved, share = 4000, DEPTH // STRIDE, (CONTRIBUTIONS if half else RESULTS) * PACE
    op = rank.enter()
    op.shares = (shares := np.full(RANKS, rows, np.int64)).ctypes.data
    op.starts = (starts := np.zeros(RANKS, np.int64)).ctypes.data
    op.firsts = (firsts := np.zeros(RANKS, np.int64)).ctypes.data
    memory = np.zeros((rows, STRIDE), np.uint8)
    named(memory, op.label, np.arange(rows))
    op.given, op.states = memory.ctypes.data, (states := np.zeros((rows, 4), np.uint64)).ctypes.data
    rank.keep(label := op_label(1, 0) + 9, rows)
    about = {"half": True, "tag": op.place.tag} if half else {}
    assert rank.ask(op.label if half else label, 1, range(rows), rows, **about)
    assert (rank.answer(5), sum(len(places) for _, _, places in rank.sent())) == ([], saved)
    burst = rank.line.queue.pacer.largest(STRIDE)
    assert rank.voice.again == pytest.approx(5 + burst * STRIDE / share * 1e9, abs=2)
    rank.keep(1, 10)
    assert rank.ask(1, 2, (4,), 10)  # of an older op
    assert (rank.answer(6), rank.sent()) == ([], [(1, 2, [4])])
    assert (rank.answer(rank.voice.again), [len(places) for _, _, places in rank.sent()]) == ([], [burst])
    left, now = rows - saved - burst, rank.voice.again
    while rank.voice.waiting:
        now = max(now + MS, rank.voice.again)
        assert rank.answer(now) == []
    assert now - rank.voice.again - 5 == pytest.approx((left + burst) * STRIDE / share * 1e9, rel=0.1, abs=2 * MS)
    assert sorted(place for _, _, places in rank.sent() for place in places) == list(range(saved + burst, rows))
    assert len(shares) == len(starts) == len(firsts) == RANKS
    assert states.shape == (rows, 4)
    core().fast.tb_leave(rank.terms.pointer, ctypes.addressof(op))


@settings(max_examples=300)
@given(st.binary(max_size=1408), st.integers(0, 65535), st.integers(0, 65535))
def test_any_body_is_refused_or_within_the_list(body: bytes, row: int, rows: int) -> None:
    with UdpSocket() as sock:
        rank = Answers(sock)
        taken = rank.fast.tb_note_request(ctypes.addressof(rank.voice), 1, 1, 0, TAG, row, rows, body, len(body))
        asked = (row + bits_of(body)).tolist()
        assert (taken, rank.answer()) == ((1, [(1, 1, asked)]) if asked and asked[-1] < rows else (0, []))


def test_another_layout_takes_the_place_of_the_first(rank: Answers) -> None:
    rank.keep(1, 10)
    assert rank.ask(1, 1, (1, 2), 10, tag=TAG + 1)
    assert rank.ask(1, 1, (3,), 10)
    assert (rank.answer(), rank.sent()) == ([], [(1, 1, [3])])
    assert not rank.ask(1, 256, (3,), 10), "no rank"
