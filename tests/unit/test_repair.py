"""What is asked for, when, and what is spent on answers: the pure parts of repair, with the time as a number.

Rule: clock-23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailbound.collective import repair as rules
from tailbound.collective.repair import (
    LOOK,
    PATIENCE_MOST,
    REPEATS,
    REPEATS_COLD,
    SHARE,
    WARM_UP_OPS,
    Budget,
    Places,
    Repairs,
    Request,
    Requests,
    Round,
    asked_most,
    decode_repair,
    encode_repair,
    patience,
    thin,
)
from tailbound.transport.backoff import AnswerTime
from tailbound.transport.config import FLOOR, MS
from tailbound.wire.packets import header as make_header
from tailbound.wire.packets import packet, parse
from tailbound.wire.schema import PacketType

_ROWS = 100
_PAUSE = 2 * MS
PATIENCE, SOON = FLOOR, FLOOR // rules.SOON


def asking(
    most: int = 1000, repeats: int = REPEATS, patience: int = PATIENCE, answers: AnswerTime | None = None, seed: int = 1
) -> Round:
    return Round(seed, most, repeats, patience, answers or AnswerTime(patience, patience))


class Owners:
    """Lists of 100 rows and what is missing of them; answers, or not, as the test says."""

    def __init__(self, missing: dict[int, list[int]], **given: Any) -> None:
        self.missing = {rank: set(places) for rank, places in missing.items()}
        self.round = asking(**given)
        self.looked: list[int] = []

    def lacking(self, rank: int) -> Places:
        self.looked.append(rank)
        return np.array(sorted(self.missing[rank]), np.int64)

    def turn(self, now: int, finished: list[int] | None = None) -> list[tuple[int, list[int]]]:
        here = sorted(self.missing) if finished is None else finished
        requests = self.round.turn(now, here, self.lacking, lambda _: _ROWS, _PAUSE)
        return [(rank, places.tolist()) for rank, places in requests]

    def run(self, until: int, each: Callable[[int], None] = lambda _: None) -> list[tuple[int, int, list[int]]]:
        """Looks whenever the round says so; (time, rank, places) of everything it asked for."""
        now, asked = 0, []
        while True:
            asked += [(now, *request) for request in self.turn(now)]
            if not self.round.open or now >= until:
                return asked
            assert self.round.look > now
            now = self.round.look
            each(now)


def test_nothing_is_asked_before_the_finished_mark_and_a_pause() -> None:
    owners = Owners({1: [3, 4], 2: [7]})
    assert owners.turn(0, []) == []
    assert not owners.round.open
    assert owners.turn(10, [1]) == []
    assert owners.round.open
    assert owners.round.look == 10 + _PAUSE
    assert owners.turn(10 + _PAUSE - 1, [1]) == []
    assert owners.looked == []  # rows may still be on their way, so nobody counts them
    assert owners.turn(10 + _PAUSE, [1]) == [(1, [3, 4])]
    assert owners.looked == [1]


def test_who_is_through_is_not_even_looked_at() -> None:
    owners = Owners({1: [3]})
    owners.turn(0)
    owners.turn(_PAUSE)
    assert not owners.round.over(1)
    assert not owners.round.over(2)
    owners.round.gone(1)
    assert owners.round.over(1)
    assert owners.turn(_PAUSE + PATIENCE) == []
    assert owners.looked == [1]


def test_what_comes_in_the_pause_is_not_asked_for() -> None:
    owners = Owners({1: [3]})
    owners.turn(0)
    owners.missing[1].clear()
    assert owners.turn(_PAUSE) == []
    assert not owners.round.open
    assert owners.round.look == 0


def test_repeats_leave_out_what_has_come_and_there_is_one_more_if_something_has() -> None:
    owners = Owners({1: [3, 4, 90]})
    asked = owners.run(10**12, lambda now: owners.missing[1].discard(4) if now > _PAUSE else None)
    assert [places for _, _, places in asked] == [[3, 4, 90], [3, 90], [3, 90]]


def test_a_question_that_was_lost_is_not_the_only_one_that_may_be_repeated() -> None:
    owners = Owners({1: [3, 4, 90]}, patience=8 * MS)

    def second_is_answered_in_part(now: int) -> None:
        if now >= _PAUSE + 10 * MS:
            owners.missing[1].difference_update([3, 4])

    asked = owners.run(10**12, second_is_answered_in_part)
    assert [places for _, _, places in asked] == [[3, 4, 90], [3, 4, 90], [90]]


def test_an_answer_that_is_still_coming_is_waited_for() -> None:
    """Rows that trickle in a millisecond apart take longer than patience, and are not asked for again."""
    owners = Owners({1: list(range(20))})

    def trickle(now: int) -> None:
        if now > _PAUSE and owners.missing[1]:
            owners.missing[1].discard(min(owners.missing[1]))

    assert len(owners.run(10**12, trickle)) == 1
    assert 20 * LOOK > PATIENCE


def test_gone_ends_it() -> None:
    owners = Owners({1: [3], 2: [5]})
    owners.turn(0)
    owners.round.gone(1)  # has not been asked: says nothing
    assert owners.turn(_PAUSE) == [(1, [3]), (2, [5])]
    owners.round.gone(1)
    assert owners.round.open
    owners.round.gone(2)
    owners.round.gone(77)
    assert not owners.round.open


def test_a_suspect_is_no_longer_waited_for() -> None:
    owners = Owners({1: [3], 2: [5]})
    owners.turn(0)
    owners.turn(_PAUSE)
    owners.missing[1].clear()
    assert owners.turn(_PAUSE + LOOK, [1]) == []
    assert not owners.round.open


@given(
    st.dictionaries(st.integers(1, 7), st.sets(st.integers(0, _ROWS - 1)), min_size=1, max_size=7),
    st.integers(0, 60),
    st.integers(0, 2**32 - 1),
)
def test_never_more_than_allowed_and_only_what_is_missing(missing: dict[int, set[int]], most: int, seed: int) -> None:
    owners = Owners({rank: sorted(places) for rank, places in missing.items()}, most=most, seed=seed)
    asked = owners.run(10**12)
    first = {rank: places for _, rank, places in reversed(asked)}
    assert sum(map(len, first.values())) == min(most, sum(map(len, missing.values())))
    assert all(set(places) <= missing[rank] for rank, places in first.items())
    assert max((sum(1 for _, r, _ in asked if r == rank) for rank in missing), default=0) <= 2
    assert {rank: places.tolist() for rank, places in owners.round.asked.items()} == first
    assert not owners.round.open


def test_who_misses_much_waits_a_random_while() -> None:
    """More than a quarter: a delay that differs by seed, so that not all ranks ask at once; a quarter: none."""
    times = [Owners({1: list(range(26))}, seed=seed).run(10**12)[0][0] for seed in range(50)]
    assert min(times) >= _PAUSE
    assert max(times) < _PAUSE + PATIENCE
    assert len(set(times)) > 45
    assert Owners({1: list(range(26))}, seed=3).run(10**12)[0][0] == times[3]
    assert Owners({1: list(range(25))}).run(10**12)[0][0] == _PAUSE


def test_nobody_waits_for_a_few_rows_whatever_part_of_a_list_they_are() -> None:
    """With many ranks a list is a row or two: each loss was asked for up to 50 ms late. Rule: clock-23."""
    lost = np.arange(2)
    asked = asking(seed=3)
    assert not asked.turn(0, [1], lambda rank: lost, lambda rank: 2, _PAUSE)
    ((rank, places),) = asked.turn(_PAUSE, [1], lambda rank: lost, lambda rank: 2, _PAUSE)
    assert (rank, places.tolist()) == (1, [0, 1])


def test_cold_ops_ask_for_all_and_more_often() -> None:
    """Rule: clock-26."""
    assert asked_most(1000, cold=False) == 250
    assert asked_most(1000, cold=True) == 1000
    assert asked_most(3, cold=False) == 1
    asked = Owners({1: list(range(100))}, most=asked_most(100, cold=True), repeats=REPEATS_COLD).run(10**12)
    assert [len(places) for _, _, places in asked] == [100] * (1 + REPEATS_COLD)


def test_the_repeat_follows_how_long_answers_take() -> None:
    answers = AnswerTime(SOON, PATIENCE_MOST)

    def asked_at(answer_after: int) -> list[int]:
        """When is asked, of a rank that answers the first question after so long."""
        owners, begun = Owners({1: [3]}, answers=answers), _PAUSE

        def answered(now: int) -> None:
            if now - begun >= answer_after:
                owners.missing[1].clear()

        return [at - begun for at, _, _ in owners.run(10**12, answered)]

    # nothing is known, and nothing came; the last question waits for 20 ms, time enough for another one
    assert asked_at(10**12) == [0, SOON, 3 * SOON]
    for _ in range(40):
        asked_at(4 * MS)
    assert asked_at(4 * MS) == [0]
    assert asked_at(10**12) == [0, 8 * MS]
    for _ in range(40):
        asked_at(9 * MS)
    assert asked_at(10**12) == [0, PATIENCE]


def test_what_repair_brought_is_learned_from_at_the_end_of_the_op_too() -> None:
    answers = AnswerTime(SOON, PATIENCE_MOST)
    owners = Owners({1: [3], 2: [4]}, answers=answers)
    owners.turn(0)
    owners.round.came(1, 1)  # nothing has been asked yet
    assert answers.value == SOON
    owners.turn(_PAUSE)
    for _ in range(2):  # once is enough
        owners.round.came(1, _PAUSE + 40 * MS)
    assert answers.value == 10 * MS
    assert owners.round.open  # the other one
    owners.round.came(2, _PAUSE + 40 * MS)
    assert not owners.round.open


def test_patience_follows_what_results_take() -> None:
    assert [patience(d2 * MS, FLOOR) for d2 in (0, 40, 100, 10_000)] == [PATIENCE, PATIENCE, 25 * MS, PATIENCE_MOST]


def test_thinning_is_even() -> None:
    kept = thin(np.arange(1000), 50)
    assert kept.tolist() == list(range(0, 1000, 20))
    assert thin(np.arange(5), 9).tolist() == [0, 1, 2, 3, 4]
    assert len(thin(np.arange(5), 0)) == 0


# -- answers ------------------------------------------------------------------------------------------------------


def test_when_the_budget_is_back() -> None:
    budget = Budget(1e9, 10_000)
    assert budget.enough_in(10_000) == 0
    budget.take(1, 5)
    assert budget.enough_in(10_000) > 0
    budget.take(9_999, 5)
    wait = budget.enough_in(4000)
    assert wait in (80_000, 80_001)
    assert wait == pytest.approx(4000 / (SHARE * 1e9) * 1e9, abs=2)
    assert budget.take(4000, 5 + wait) == 4000
    assert budget.enough_in(1 << 40) <= 10_000 / (SHARE * 1e9) * 1e9 + 2  # never a wait without an end
    budget.give(700)
    assert budget.take(700, 5 + wait) == 700


def _answered(repairs: Repairs, seconds: float, pace: float, rates: dict[int, float]) -> dict[int, int]:
    """Bytes of answers in ``seconds`` to ranks that ask for all they can get, beyond what had been saved up."""
    now, sent = 1, dict.fromkeys(rates, 0)
    for rank, rate in rates.items():
        while repairs.take(rank, 1 << 30, now, pace, rate):
            pass
    for _ in range(int(seconds * 1e4)):
        now += 100_000
        for rank, rate in rates.items():
            sent[rank] += repairs.take(rank, 1 << 30, now, pace, rate)
    return sent


@pytest.mark.parametrize("pace", [1.25e7, 1.25e9])
def test_answers_to_all_take_their_share_of_the_pace_in_force(pace: float) -> None:
    sent = _answered(Repairs(4), 1.0, pace, {1: 0.0, 2: 0.0, 3: 0.0})
    assert sum(sent.values()) == pytest.approx(SHARE * pace, rel=0.01)


def test_answers_to_a_rank_take_their_share_of_its_rate() -> None:
    sent = _answered(Repairs(4), 1.0, 1.25e9, {1: 1e7, 2: 0.0})
    assert sent[1] == pytest.approx(SHARE * 1e7, rel=0.02)
    assert sum(sent.values()) == pytest.approx(SHARE * 1.25e9, rel=0.01)


def test_what_is_not_needed_is_put_back_in_both() -> None:
    repairs = Repairs(4)
    depth = repairs.take(1, 1 << 30, 1, 1e9, 1e7)
    assert repairs.take(1, 1000, 1, 1e9, 1e7) == 0
    wait = repairs.enough_in(1, 1000, 1e7)
    assert Repairs(4).enough_in(2, 1000, 0.0) == 0
    assert wait == pytest.approx(1000 / (SHARE * 1e7) * 1e9, rel=0.01)
    repairs.give(1, depth, 1e7)
    assert repairs.take(1, 1 << 30, 1, 1e9, 1e7) == depth


def test_who_has_had_its_share_does_not_hold_the_others_up() -> None:
    requests = Requests()
    for label, asker in ((3, 1), (2, 2), (1, 1)):
        requests.add(_request(label, asker))
    found = [requests.newest(held) for held in ((), {1}, {2}, {1, 2})]
    assert [request and (request.label, request.asker) for request in found] == [(3, 1), (2, 2), (3, 1), None]


def _request(label: int, asker: int = 1, places: tuple[int, ...] = (0,), *, first_half: bool = False) -> Request:
    return Request(label & 0xFFFFFFFF, asker, first_half, 7, np.array(places, np.int64))


def test_the_newest_op_is_answered_first_across_the_wrap() -> None:
    requests = Requests()
    for label in (-3, 2, -1, 1):
        requests.add(_request(label))
    order = []
    while (request := requests.newest()) is not None:
        order.append(request.label)
        requests.done(request, 1)
    assert order == [2, 1, 0xFFFFFFFF, 0xFFFFFFFD]


def test_a_request_again_adds_to_the_first() -> None:
    requests = Requests()
    requests.add(_request(1, places=(1, 5)))
    requests.add(_request(1, places=(2, 5)))
    requests.add(_request(1, asker=2, places=(9,)))
    assert len(requests) == 2
    request = requests.newest()
    assert request is not None
    assert not request.holes
    assert request.places.tolist() == [1, 2, 5]
    requests.done(request, 2)
    assert request.places.tolist() == [5]
    assert len(requests) == 2


def test_requests_are_bounded_and_the_oldest_goes() -> None:
    requests = Requests(most=3)
    for label in (5, 1, 9, 7):
        requests.add(_request(label))
    assert len(requests) == 3
    left = []
    while (request := requests.newest()) is not None:
        left.append(request.label)
        requests.done(request, 1)
    assert left == [9, 7, 5]
    for asker in (1, 2, 3, 4):
        requests.add(_request(6, asker))
    assert [request.asker for request in requests._waiting.values()] == [2, 3, 4]  # of one op's, the first


def test_a_request_for_another_layout_takes_the_place_of_the_first() -> None:
    requests = Requests()
    requests.add(_request(1, places=(1, 5)))
    other = _request(1, places=(2,))
    other.layout += 1
    requests.add(other)
    request = requests.newest()
    assert request is not None
    assert request.places.tolist() == [2]


def test_gone_is_said_once() -> None:
    requests = Requests(most=2)
    assert requests.say_gone(1, 2, first_half=False)
    assert not requests.say_gone(1, 2, first_half=False)
    assert requests.say_gone(1, 2, first_half=True)
    assert not requests.say_gone(1, 2, first_half=False)
    assert requests.say_gone(1, 3, first_half=False)
    assert requests.say_gone(1, 2, first_half=False)  # forgotten by then: memory is bounded


def test_the_warm_up_is_counted_by_key() -> None:
    repairs, key, other = Repairs(4), (0, 100, 0, 1), (1, 100, 0, 1)
    assert repairs.came.shape == (2, 4)
    for _ in range(WARM_UP_OPS):
        assert repairs.warming(key)
        repairs.finished(key)
    assert not repairs.warming(key)
    assert repairs.warming((*key[:3], 8 << 2 | 1))  # other bits
    assert repairs.warming(other)


def test_the_last_call_counts_from_the_first_question() -> None:
    """Rule: clock-13."""
    repair = asking(most=10, patience=20 * MS)
    for now in (1000 * MS, 1010 * MS):
        repair.turn(now, [1], lambda _: np.array([3]), lambda _: _ROWS, 0)
    assert repair.last_call == 1040 * MS


# -- bodies -------------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 65534), min_size=1, max_size=400), st.sampled_from([16, 256, 1408]))
def test_what_is_asked_comes_out(places: set[int], width: int) -> None:
    wanted = np.array(sorted(places), np.int64)
    found = []
    for row, body in encode_repair(wanted, width):
        assert 0 < len(body) <= width
        parsed = parse(packet(make_header(type=PacketType.REPAIR, row=row, rows=65535), body))  # pads with zeros
        assert parsed is not None
        part = decode_repair(parsed[1], int(parsed[0]["row"][0]), 65535)
        assert part is not None
        found += part.tolist()
    assert found == wanted.tolist()


def test_few_packets_for_many_rows() -> None:
    assert len(encode_repair(np.arange(20_000), 1408)) == 2
    assert encode_repair(np.zeros(0, np.int64), 1408) == []
    assert encode_repair(np.array([0, 7, 8 * 16]), 16) == [(0, bytes([0b10000001])), (128, bytes([0b10000000]))]
    assert decode_repair(bytes([0b10000000]), 5, 5) is None  # one beyond the last
    ((row, body),) = encode_repair(np.array([9, 11]), 1408)
    assert (row, body) == (9, bytes([0b10100000]))


@settings(max_examples=300)
@given(st.binary(max_size=1408), st.integers(0, 65535), st.integers(0, 65535))
def test_any_body_is_refused_or_within_the_list(body: bytes, row: int, rows: int) -> None:
    places = decode_repair(body, row, rows)
    if places is None:
        assert not any(body) or row + max(i for i in range(8 * len(body)) if body[i >> 3] << (i & 7) & 128) >= rows
    else:
        assert row <= places[0]
        assert places[-1] < rows
        assert (np.diff(places) > 0).all()
        assert len(places) == sum(byte.bit_count() for byte in body)
