"""What may be waited past deadlines, and for whom (clock-29)."""

from __future__ import annotations

from tailbound.transport.config import FLOOR
from tailbound.transport.overtime import FIRST, LONGEST, MOST, SHARE, Extension, Overtime

MS, S = 1_000_000, 1_000_000_000


def deadline(due: int, length: int = 40 * MS) -> Extension:
    clock = Extension()
    clock.start(due - length, length, 2 * S)
    return clock


def test_a_share_of_the_time_is_saved_up_to_a_bound() -> None:
    overtime = Overtime(S)
    assert overtime.left(S) == FIRST
    assert overtime.left(2 * S) == FIRST + SHARE * S
    assert overtime.left(1000 * S) == MOST


def test_a_lower_floor_saves_up_less_and_takes_shorter_silences() -> None:
    low = Overtime(S, FLOOR // 10)
    assert (low.left(S), low.left(1000 * S), low.reserve) == (FIRST // 10, MOST // 10, Overtime(S).reserve // 10)
    assert low.silence(deadline(S, 0)) == FLOOR // 10


def test_time_in_which_several_ops_wait_is_paid_for_once() -> None:
    overtime = Overtime(S)
    overtime.charge(deadline(S), S + 50 * MS)
    overtime.charge(deadline(S + 20 * MS), S + 80 * MS)
    overtime.charge(deadline(S + 90 * MS), S + 85 * MS)
    assert overtime.waited == 80 * MS
    assert abs(overtime.left(S + 85 * MS) - (FIRST - 80 * MS + SHARE * 85 * MS)) <= 2


def test_only_what_is_past_a_deadline_costs_anything() -> None:
    overtime = Overtime(S)
    overtime.charge(Extension(), S + 10 * MS)  # has not begun
    overtime.charge(deadline(S + 90 * MS), S + 50 * MS)
    assert overtime.waited == 0
    overtime.charge(deadline(S + 40 * MS), S + 60 * MS)
    overtime.charge(deadline(S + 50 * MS), S + 60 * MS)
    assert overtime.waited == 20 * MS


def test_it_is_worth_a_step_that_is_saved_up_to_the_last_nanosecond() -> None:
    for length, worth in ((10 * FIRST, True), (10 * FIRST + 10, False)):
        assert Overtime(S).worth(deadline(S, length), S, S) == worth


def test_a_silence_ends_with_its_last_nanosecond() -> None:
    overtime, clock = Overtime(S), deadline(S)
    assert overtime.worth(clock, S, S - 20 * MS)
    assert not overtime.worth(clock, S, S - 20 * MS - 1)
    assert not Overtime(0).worth(deadline(15 * MS), 15 * MS, 0)  # never heard of, on a machine that has just begun


def test_a_silence_may_be_as_long_as_answers_take() -> None:
    overtime, clock = Overtime(S), deadline(S)
    assert overtime.silence(clock) == 20 * MS
    overtime.asked(2, S, S - MS)
    overtime.asked(2, S + 20 * MS, S - MS)  # the same silence
    overtime.spoke(2, S + 80 * MS)
    overtime.spoke(2, S + 300 * MS)  # nobody has asked
    assert (overtime.answer, overtime.silence(clock)) == (80 * MS, 160 * MS)
    overtime.asked(3, 2 * S, S)
    overtime.asked(3, 2 * S + 20 * MS, 2 * S + 10 * MS)  # a mark of it has risen in between
    assert overtime.answer == 80 * MS
    overtime.asked(3, 2 * S + 110 * MS, 2 * S + 20 * MS)  # it said something as it was asked, so nothing in return
    overtime.spoke(3, 2 * S + 120 * MS)
    assert overtime.answer == 100 * MS


def test_a_stop_is_no_answer() -> None:
    overtime = Overtime(S)
    overtime.asked(2, S, 0)
    overtime.spoke(2, S + LONGEST + 1)
    assert overtime.answer == 0
    overtime.asked(2, 2 * S, 0)
    overtime.spoke(2, 2 * S + LONGEST)
    assert overtime.answer == LONGEST


def test_a_question_is_open_until_its_rank_speaks() -> None:
    overtime = Overtime(S)
    assert overtime.open_since(2) == 0
    overtime.asked(2, S, S - MS)
    overtime.asked(2, S + 20 * MS, S - MS)
    assert overtime.open_since(2) == S
    overtime.spoke(2, S + 30 * MS)
    assert overtime.open_since(2) == 0


def op(overtime: Overtime, *waited: int) -> None:
    """An op, before each of whose turns the thread has ``waited`` for a core so long in all."""
    for each in waited:
        overtime.turned(each)
    overtime.ended()


def test_own_waits_for_a_core_are_those_between_two_turns_and_make_silences_longer() -> None:
    """A busy host makes many short ones in an op: all together are no silence of anybody. Rule: clock-29."""
    overtime, clock = Overtime(S), deadline(S)
    assert (overtime.lack, overtime.lacked) == (0, 0)
    op(overtime, 10 * MS, 40 * MS, 50 * MS)
    op(overtime, 55 * MS)
    assert (overtime.lack, overtime.lacked) == (30 * MS, 55 * MS)
    assert overtime.silence(clock) == 60 * MS
    for _ in range(63):
        op(overtime, 55 * MS)
    assert overtime.lack == 5 * MS  # of the last 64 ops
    op(overtime, 55 * MS)
    assert (overtime.lack, overtime.silence(clock)) == (0, 20 * MS)
    op(overtime, 10 * S)
    assert overtime.silence(clock) == LONGEST


def test_late_wake_ups_tell_of_waits_that_the_kernel_does_not_count() -> None:
    """Of the hypervisor's, and where it counts nothing; a stop is none. Rule: clock-29."""
    overtime = Overtime(S)
    overtime.woke(40 * MS)
    overtime.woke(7 * MS)
    op(overtime)
    overtime.turned(None)
    assert (overtime.lack, overtime.lacked) == (40 * MS, 0)
    for _ in range(64):
        overtime.woke(LONGEST + 1)
        op(overtime)
    assert overtime.lack == 0
    overtime.woke(LONGEST)
    op(overtime, 50 * MS)
    assert (overtime.lack, overtime.lacked) == (LONGEST, 50 * MS)


def test_how_late_the_own_thread_wakes_up() -> None:
    overtime = Overtime(S)
    assert overtime.late == 0
    overtime.woke(-MS)
    assert overtime.late == 0
    for late in range(40):
        overtime.woke(late * MS)
    assert overtime.late == 37 * MS
