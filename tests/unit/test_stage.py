"""The decision that ends a stage (clock-7, clock-11 to clock-13), and what may be waited past it (clock-29)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tailbound.transport.config import FLOOR
from tailbound.transport.overtime import FIRST, LONGEST, MOST, SHARE, Extension, Overtime
from tailbound.transport.stage import Decision, Quiet, Repair, cut, decide

MS, S = 1_000_000, 1_000_000_000


@dataclass
class Half:
    """A stage as it is told to be."""

    progress: int = 0
    left: int = 1
    whole: bool = False
    all_finished: bool = False
    repairing: int = 0
    insist: int = 0
    was_late: bool | None = None
    word: int = 0
    asks: tuple[str, ...] = ()

    def complete(self) -> bool:
        return self.whole

    def finished(self) -> bool:
        return self.all_finished

    def heard(self, now: int) -> int:
        return self.word

    def repair(self, now: int, *, late: bool) -> Repair[str]:
        self.was_late = late
        if now >= self.repairing and not self.asks:
            return Repair()
        open_ = now < self.repairing
        return Repair(open_, self.repairing if open_ else 0, self.asks)

    def insists(self, over: int, *, late: bool) -> int:
        return over + self.insist


def clocks(due: int = 100 * MS) -> tuple[Extension, Quiet]:
    clock = Extension()
    clock.start(due - 50 * MS, 50 * MS, 500 * MS)
    return clock, Quiet()


def test_complete_ends_at_once_whatever_the_clock_says() -> None:
    """Rules: clock-7a, clock-12."""
    assert decide(Half(whole=True), Extension(), Quiet(), 5, MS, 0, None) == Decision("complete", 0)


def test_without_a_clock_it_waits_for_arrivals() -> None:
    assert decide(Half(), Extension(), Quiet(), 5 * MS, MS, 0, None) == Decision(None, 0)


def test_all_finished_and_quiet() -> None:
    """Rules: clock-7b, clock-12."""
    clock, quiet = clocks()
    half = Half(progress=3, all_finished=True)
    assert decide(half, clock, quiet, 60 * MS, MS, 0, None) == Decision(None, 61 * MS)
    half.progress = 4
    assert decide(half, clock, quiet, 61 * MS, MS, 0, None) == Decision(None, 62 * MS)
    assert decide(half, clock, quiet, 62 * MS, MS, 0, None) == Decision("quiet", 0)


def test_repair_keeps_it_from_being_quiet_but_not_from_its_deadline() -> None:
    """Rules: clock-7b, clock-23."""
    clock, quiet = clocks()
    half = Half(progress=3, all_finished=True, repairing=300 * MS)
    assert decide(half, clock, quiet, 60 * MS, MS, 0, None)[0] is None
    assert decide(half, clock, quiet, 95 * MS, MS, 0, None)[0] is None
    assert decide(half, clock, quiet, 100 * MS, MS, 0, None) == Decision("deadline", 0)


def test_the_deadline_stands_where_one_more_tenth_would_not_do() -> None:
    """Rule: clock-7c."""
    clock, quiet = clocks()
    half = Half(progress=3, left=10)
    decide(half, clock, quiet, 95 * MS, MS, 0, None)
    half.progress, half.left = 8, 5
    assert decide(half, clock, quiet, 100 * MS, MS, 0, None) == Decision(None, 105 * MS)
    half.progress, half.left = 10, 3
    assert decide(half, clock, quiet, 105 * MS, MS, 0, None) == Decision("deadline", 0)


def test_what_is_cut_off_is_told_by_the_pace_of_the_slowest_flow() -> None:
    """Rule: clock-5."""
    assert cut(100, [(50, 100), (90, 100), (0, 100), (100, 100)]) == (200, pytest.approx(0.3))
    assert cut(100, [(80, 100)]) == (125, pytest.approx(0.2))
    assert cut(100, [(1, 100)]) == (200, pytest.approx(0.99))
    assert cut(100, [(0, 100)]) == cut(100, []) == (None, 0.0)


def test_a_deadline_in_the_first_nanosecond_of_the_clock_is_one() -> None:
    """Rule: clock-13."""
    clock = Extension()
    clock.start(0, 1, 500)
    assert decide(Half(), clock, Quiet(), 2, MS, 2, None) == Decision("deadline", 0)


@pytest.mark.parametrize("launched", [0, 130])
def test_rows_that_can_still_be_had_are_insisted_on_past_the_deadline(launched: int) -> None:
    """That takes nothing off the overtime budget. Rules: clock-13, clock-35."""
    clock, quiet = clocks()
    half = Half(progress=3, repairing=134 * MS, insist=10 * MS)
    decide(half, clock, quiet, 95 * MS, MS, 0, None)
    assert decide(half, clock, quiet, 130 * MS, MS, launched * MS, None) == Decision(None, 134 * MS)
    half.progress += 1
    assert decide(half, clock, quiet, 136 * MS, MS, launched * MS, None) == Decision(None, 140 * MS)
    assert decide(half, clock, quiet, 140 * MS, MS, launched * MS, None) == Decision("deadline", 0)
    overtime = Overtime(95 * MS)
    overtime.charge(clock, 140 * MS)
    assert overtime.waited == (0 if launched else 30 * MS)
    half.whole = True
    assert decide(half, clock, quiet, 136 * MS, MS, launched * MS, None) == Decision("complete", 0)


def until(half: Half, overtime: Overtime, *, words: bool, launched: int = 0, first: int = 95 * MS) -> int:
    """When the deadline (due at 100 ms, for 50 ms) ends a stage of which no row comes; ``words``: its ranks answer."""
    clock, quiet = clocks()
    now = first
    while True:
        if words:
            half.word = now - MS
        why, again, _ = decide(half, clock, quiet, now, MS, launched, overtime)
        if why is not None:
            assert why == "deadline"
            overtime.charge(clock, now)
            return now
        now = again


def test_who_lives_is_waited_for_as_long_as_there_is_time_saved_up() -> None:
    """Rows before tails: but what was saved up is gone then, and the next op ends at its deadline (clock-29)."""
    overtime = Overtime(95 * MS)
    assert until(Half(), overtime, words=True) == pytest.approx(min(100 * MS + FIRST, 550 * MS), abs=6 * MS)
    overtime = Overtime(95 * MS)
    spent = Extension()
    spent.start(1, 19 * MS, 500 * MS)
    overtime.charge(spent, 20 * MS + 2 * FIRST)  # far more was waited than was saved up
    assert until(Half(), overtime, words=True) == 100 * MS


def test_rows_that_are_asked_for_are_waited_for_past_the_deadline() -> None:
    """Rules: clock-23, clock-29."""
    half = Half(repairing=130 * MS)
    saved_up = Overtime(-20_000 * MS)
    assert until(half, saved_up, words=False) == pytest.approx(130 * MS, abs=6 * MS)
    assert until(half, Overtime(95 * MS), words=False) == 100 * MS  # the rest is for ranks of which more is missing


def test_a_late_launch_waits_for_who_lives_from_its_own_time_on() -> None:
    """Rules: clock-13, clock-29."""
    overtime = Overtime(95 * MS)
    end = until(Half(progress=3, word=200 * MS), overtime, words=False, launched=200 * MS, first=200 * MS)
    assert end == pytest.approx(225 * MS, abs=6 * MS)
    assert overtime.waited <= 30 * MS


# -- what may be waited past deadlines, and for whom -------------------------------------------------------------------


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


#: Questions to a rank (when, and when it was heard last), words of it, and how long answers take after each.
ANSWERS: dict[str, list[tuple[str, int, tuple[int, ...], int]]] = {
    "from the first question of a silence to the first word": [
        ("asked", 2, (S, S - MS), 0),
        ("asked", 2, (S + 20 * MS, S - MS), 0),  # the same silence
        ("spoke", 2, (S + 80 * MS,), 80 * MS),
        ("spoke", 2, (S + 300 * MS,), 80 * MS),  # not asked for
        ("asked", 3, (2 * S, S), 80 * MS),
        ("asked", 3, (2 * S + 20 * MS, 2 * S + 10 * MS), 80 * MS),  # a mark of it has risen in between
        ("asked", 3, (2 * S + 110 * MS, 2 * S + 20 * MS), 80 * MS),  # it spoke as it was asked, so not in return
        ("spoke", 3, (2 * S + 120 * MS,), 100 * MS),
    ],
    "a stop is no answer": [
        ("asked", 2, (S, 0), 0), ("spoke", 2, (S + LONGEST + 1,), 0),
        ("asked", 2, (2 * S, 0), 0), ("spoke", 2, (2 * S + LONGEST,), LONGEST),
    ],
}  # fmt: skip


@pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS)
def test_a_silence_may_be_as_long_as_answers_take(said: list[tuple[str, int, tuple[int, ...], int]]) -> None:
    overtime, clock = Overtime(S), deadline(S)
    for word, rank, times, answer in said:
        getattr(overtime, word)(rank, *times)
        assert (overtime.answer, overtime.silence(clock)) == (answer, min(max(20 * MS, 2 * answer), LONGEST))
    assert [overtime.open_since(rank) for rank in (2, 3)] == [0, 0], "no question is open after a word"


def test_a_question_is_open_since_it_was_asked_first() -> None:
    overtime = Overtime(S)
    overtime.asked(2, S, S - MS)
    overtime.asked(2, S + 20 * MS, S - MS)
    assert overtime.open_since(2) == S


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
