"""What is sent to a switch again: gaps, deadlines, shares, bounds; with the time passed in."""

from __future__ import annotations

import numpy as np
import pytest

from tailbound.transport.backoff import AnswerTime
from tailbound.transport.config import MS
from tailbound.transport.flush import (
    LOOK,
    PATIENCE,
    PATIENCE_MOST,
    WINDOW,
    Again,
    Places,
    Retry,
    View,
)

PAUSE = 1 * MS


class Worker:
    """One worker's op of ``rows`` rows: which results are in."""

    def __init__(self, rows: int, index: int = 0, of: int = 1) -> None:
        self.here = np.zeros(rows, bool)
        self.patience = AnswerTime(PATIENCE, PATIENCE_MOST)
        self.retry = Retry(rows, index, of, self.patience)
        self.now = 1_000 * MS
        self.sent = self.finished = self.short = self.due = False

    def missing(self) -> Places:
        return np.flatnonzero(~self.here)

    def turn(self, after: int = 0, pause: int = PAUSE) -> list[Again]:
        self.now += after
        view = View(int(self.here.sum()), self.missing, self.sent, self.finished, self.short, self.due)
        return self.retry.poll(self.now, view, pause)

    def run(self, length: int) -> list[Again]:
        """Turns whenever one is due, for ``length`` ns."""
        end, out = self.now + length, []
        while self.now < end:
            out += self.turn()
            self.now = max(self.now + MS, self.retry.look)
        return out


def places(found: list[Again]) -> list[int]:
    return sorted(int(p) for again in found for p in again.places)


def test_a_gap_that_results_have_overtaken_is_asked_for_while_rows_still_come() -> None:
    """Rule: clock-28."""
    world = Worker(100)
    world.here[:50] = True
    world.here[[3, 7]] = False
    assert places(world.turn()) == []  # they may be on their way
    world.here[50:60] = True
    assert places(world.turn(2 * MS)) == [3, 7]
    assert all(not again.flush for again in world.run(2 * PATIENCE))


def test_nothing_is_asked_for_before_the_first_result_or_beyond_the_last_one() -> None:
    world = Worker(100)
    world.sent = True
    assert world.run(50 * MS) == []
    world.here[:30] = True
    assert world.run(50 * MS) == []  # seventy rows: somebody is slow, not lost


def test_a_lost_tail_is_asked_for_once_nothing_comes_any_more() -> None:
    world = Worker(100)
    world.sent = True
    world.here[:95] = True
    assert world.run(20 * MS) == []  # somebody may still be sending
    world.finished = True
    assert set(places(world.run(4 * MS))) == {95, 96, 97, 98, 99}
    assert world.retry.gaps == 5


def test_at_the_deadline_each_releases_its_share_and_then_what_is_left() -> None:
    """Rule: clock-28."""
    world = Worker(9, index=1, of=3)
    world.due = True
    first = world.turn()
    assert places(first) == [1, 4, 7]
    assert first[0].flush
    world.here[[1, 4, 7]] = True
    world.here[[0, 3]] = True  # another rank's share
    assert places(world.turn(1 * MS)) == []
    assert set(places(world.run(3 * PATIENCE))) == {2, 5, 6, 8}


def test_who_is_known_to_be_missing_is_not_waited_for_until_the_deadline() -> None:
    """Rule: clock-28."""
    world = Worker(10)
    world.sent = world.short = True
    assert world.run(20 * MS) == []
    world.finished = True
    assert places(world.run(3 * MS)) == list(range(10))


def test_a_release_goes_out_in_a_window_that_answers_widen() -> None:
    world = Worker(5000)
    world.due = True
    sizes = []
    for _ in range(4):
        found = places(world.turn(world.retry.look - world.now if world.retry.look else 0))
        sizes.append(len(found))
        world.here[found] = True
    assert sizes == [WINDOW, 2 * WINDOW, 4 * WINDOW, 8 * WINDOW]


# -- exactly when -------------------------------------------------------------------------------------------------


def test_rows_are_looked_through_once_a_millisecond_and_less_often_in_large_ops() -> None:
    for rows, pause, apart in ((100, 0, LOOK), (100, 3 * MS, 3 * MS), (20_000, PAUSE, 5 * MS)):
        world = Worker(rows)
        assert world.retry.look == 0
        assert world.turn(pause=pause) == []
        assert world.retry.look == world.now + apart
        world.due = True
        assert world.turn(apart - 1, pause=pause) == []
        assert world.turn(1, pause=pause)


def test_a_tail_is_asked_for_after_the_pause_and_only_where_all_is_sent_here_and_there() -> None:
    for sent, finished, asked in ((True, True, 5), (True, False, 0), (False, True, 0)):
        world = Worker(100)
        world.here[:95] = True
        world.sent, world.finished = sent, finished
        assert world.turn() == []
        assert len(places(world.turn(PAUSE))) == asked


@pytest.mark.parametrize("quiet", [True, False])
def test_when_half_of_the_rows_are_spent_a_few_more_are_asked_for_in_silence(quiet: bool) -> None:
    world = Worker(100)
    world.here[60:99] = True
    world.turn()
    assert places(world.turn(PAUSE)) == list(range(50))
    assert places(world.turn(PATIENCE - LOOK)) == []
    world.here[99] = not quiet
    assert places(world.turn(LOOK)) == (list(range(16)) if quiet else [])


@pytest.mark.parametrize(("lacks", "released"), [(None, 10), ("sent", 0), ("finished", 0), ("short", 0), ("quiet", 0)])
def test_a_release_before_the_deadline_needs_all_to_be_through_and_somebody_to_be_missing(
    lacks: str | None, released: int
) -> None:
    world = Worker(10)
    world.sent, world.finished, world.short = lacks != "sent", lacks != "finished", lacks != "short"
    assert world.turn() == []
    assert len(places(world.turn(PAUSE, pause=PAUSE + (lacks == "quiet")))) == released
    assert world.retry.flushing == (released > 0)


def test_a_release_goes_on_and_takes_rows_that_were_asked_for_often_enough() -> None:
    world = Worker(100)
    world.here[1:50] = world.sent = world.finished = True
    for _ in range(400):
        world.turn(MS)
    assert world.turn(MS) == []
    world.short = True
    found = world.turn(MS)
    assert places(found) == [0, *range(50, 100)]
    world.here[[0, 60]], world.short = True, False
    assert world.turn(MS) == []
    assert [(again.flush, len(again.places)) for again in world.turn(PATIENCE)] == [(True, 49)]


def test_rows_that_may_still_be_answered_take_part_of_the_window() -> None:
    world = Worker(2000)
    world.due = True
    world.here[:10] = True
    assert places(world.turn()) == list(range(10, 266))
    world.here[1999] = True
    assert places(world.turn(2 * MS)) == list(range(266, 522))
    again = Worker(2000)
    again.due = True
    assert places(again.turn()) == places(again.turn(PATIENCE)) == list(range(256))
    again.here[1999] = True
    assert places(again.turn(MS)) == list(range(256, 512))  # the first are waited for twice as long now
    assert places(again.turn(PATIENCE)) == []  # as many as the window has taken after a silence
    assert places(again.turn(PATIENCE)) == list(range(256))


def test_after_an_answer_the_next_silence_is_as_short_as_the_first() -> None:
    world = Worker(2000)
    world.now = 1 * MS  # on a machine that has just begun
    world.due = True
    assert places(world.turn()) == list(range(256))
    world.here[:200] = True
    assert places(world.turn(MS)) == list(range(256, 712))
    assert places(world.turn(PATIENCE)) == list(range(200, 456))


def test_the_other_shares_are_released_when_nothing_has_come_for_as_long_as_answers_take() -> None:
    world = Worker(9, index=1, of=3)
    world.due = True
    assert places(world.turn()) == [1, 4, 7]
    assert places(world.turn(PATIENCE - LOOK)) == []
    assert places(world.turn(LOOK)) == list(range(9))


@pytest.mark.parametrize(("asked", "patience"), [(1, 10 * MS), (2, PATIENCE)])
def test_what_was_asked_for_once_tells_how_long_answers_take(asked: int, patience: int) -> None:
    world = Worker(10)
    world.here[1:] = True
    world.turn()
    for _ in range(asked):
        assert places(world.turn(PATIENCE)) == [0]
    world.here[0] = True
    world.turn(40 * MS)
    assert world.patience.value == patience
