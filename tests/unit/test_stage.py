"""The decision that ends a stage (clock-7, clock-11 to clock-13)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tailbound.transport.overtime import FIRST, Extension, Overtime
from tailbound.transport.stage import Decision, Quiet, Repair, cut, decide

MS = 1_000_000


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
