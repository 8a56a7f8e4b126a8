"""Whom to ask for a mark in a silence, and when: who has begun soon, who has not late, and both ever more rarely.

Rule: clock-30.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tailbound.transport.config import FLOOR, MS
from tailbound.transport.tail_probe import AT_ONCE, TailProbe, patience

BEGUN, NOT_BEGUN, LAST_CALL = patience(FLOOR)
Missing = Callable[[], tuple[list[int], list[int]]]


def questions(
    silence: TailProbe, begun: list[int], others: list[int], until: int, due: int = 0
) -> list[tuple[int, list[int]]]:
    """(when, whom) of all questions up to ``until``, looking when it says and nothing coming."""
    now, out = 0, []
    while now <= until:
        if asked := silence.turn(now, 0, due, lambda: (begun, others)):
            out.append((now, asked))
        assert silence.again > now
        now = silence.again
    return out


def test_who_has_begun_is_asked_soon_and_ever_more_rarely() -> None:
    found = questions(TailProbe(), [2], [], 200 * MS)
    times = [when for when, _ in found]
    assert times[0] == BEGUN.first
    pauses = [b - a for a, b in itertools.pairwise(times)]
    assert pauses[:2] == [2 * BEGUN.first, 4 * BEGUN.first]
    assert pauses == sorted(pauses)
    assert max(pauses) == BEGUN.most
    assert all(whom == [2] for _, whom in found)


def test_a_lower_floor_asks_sooner_in_proportion() -> None:
    """clock-36: where ops take fractions of a millisecond."""
    low = questions(TailProbe(FLOOR // 50), [2], [], 4 * MS)
    assert [50 * when for when, _ in low] == [when for when, _ in questions(TailProbe(), [2], [], 200 * MS)]


@pytest.mark.parametrize("due", [10 * MS, 15 * MS, 300 * MS])
def test_everybody_is_asked_once_while_the_deadline_leaves_time_for_an_answer(due: int) -> None:
    found = questions(TailProbe(), [], [1], due, due)
    assert due - LAST_CALL in [when for when, _ in found]
    assert len([when for when, _ in found if when >= due - LAST_CALL]) == 1


def test_a_deadline_that_has_moved_on_is_another_one() -> None:
    """Who is missed is to say that it lives before each of them, but every ``BEGUN.most`` will do."""
    silence, asked = TailProbe(), []
    for now in range(0, 400 * MS, MS):
        due = 100 * MS if now < 100 * MS else (now // (10 * MS) + 1) * 10 * MS
        if silence.turn(now, 0, due, lambda: ([], [1])):
            asked.append(now)
    late = [now for now in asked if now >= 90 * MS]
    assert late[0] == 100 * MS - LAST_CALL
    assert {b - a for a, b in itertools.pairwise(late)} == {BEGUN.most}


def test_who_begins_late_is_asked_soon_all_the_same() -> None:
    """Silences in which nobody had begun do not make the next question to one that has rarer."""
    silence, now = TailProbe(), 0
    assert silence.again == 0
    while now < 100 * MS:
        silence.turn(now, 0, 0, lambda: ([], [1]))
        now = silence.again
    silence.turn(now, 1, 0, lambda: ([1], []))
    assert silence.again == now + BEGUN.first
    assert silence.turn(silence.again, 1, 0, lambda: ([1], [])) == [1]


def test_a_deadline_that_is_near_from_the_start_makes_nobody_ask_at_once() -> None:
    assert questions(TailProbe(), [], [1], 10 * MS, 5 * MS) == [(BEGUN.first, [1])]


def test_a_deadline_may_be_known_later() -> None:
    silence = TailProbe()
    silence.turn(0, 0, 0, lambda: ([], [1]))
    assert silence.turn(BEGUN.first, 0, 0, lambda: ([], [1])) == []
    assert silence.again == 3 * BEGUN.first
    assert silence.turn(BEGUN.first + 1, 0, BEGUN.first + 2 * MS + LAST_CALL, lambda: ([], [1])) == []
    assert silence.again == BEGUN.first + 2 * MS
    assert silence.turn(silence.again, 0, silence.again + LAST_CALL, lambda: ([], [1])) == [1]


def test_of_many_that_are_missing_some_are_asked_at_a_time_and_all_in_turn() -> None:
    many = list(range(1, 3 * AT_ONCE - 1))
    found = questions(TailProbe(), many, [], 200 * MS)
    assert {len(whom) for _, whom in found} == {AT_ONCE}
    for at in range(len(found) - 3):
        assert {rank for _, whom in found[at : at + 3] for rank in whom} == set(many)


def test_who_is_asked_next_follows_whom_was_asked_last_though_others_have_come() -> None:
    silence, many = TailProbe(), list(range(4 * AT_ONCE))
    silence.turn(0, 0, 0, lambda: (many, []))
    assert silence.turn(silence.again, 0, 0, lambda: (many, [])) == many[:AT_ONCE]
    left = many[AT_ONCE - 1 :]
    assert silence.turn(silence.again, 0, 0, lambda: (left, [])) == left[1 : AT_ONCE + 1]
    assert silence.turn(silence._soon.due, 0, 0, lambda: (many[:3], [])) == many[:3]


def test_before_a_deadline_all_are_asked_however_many() -> None:
    many = list(range(40))
    found = questions(TailProbe(), many, [], 30 * MS, 30 * MS)
    assert (30 * MS - LAST_CALL, many) in found


def test_senders_of_short_flows_count_as_begun_for_three_questions() -> None:
    silence, asked = TailProbe(), 0
    while not silence.patient(False):
        asked += bool(silence.turn(silence.again, 0, 0, lambda: ([1], [])))
    assert asked == 3
    assert not silence.patient(True)  # in the second half they have not been asked yet


def test_rows_before_any_question_are_noted_as_a_turn_notes_them() -> None:
    """Rule: clock-30."""
    noted, turned = TailProbe(), TailProbe()
    nobody: Missing = lambda: ([], [])  # noqa: E731
    for now, progress, due in ((MS, 3, 0), (2 * MS, 7, 40 * MS), (3 * MS, 8, 5 * MS)):
        assert turned.turn(now, progress, due, nobody) == []
        assert noted.came(now, progress) == noted.again == turned.again == now + BEGUN.first
    assert noted.came(4 * MS, 8) == 0  # no news
    late = 3 * MS + BEGUN.first
    assert noted.turn(late, 8, 0, lambda: ([2], [1])) == turned.turn(late, 8, 0, lambda: ([2], [1])) == [2]
    assert noted.again == turned.again
    assert noted.came(late + MS, 9) == 0  # from the first question on the wait is another one
