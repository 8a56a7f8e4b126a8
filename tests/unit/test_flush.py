"""What is sent to a switch again: gaps, deadlines, shares, bounds; with the time passed in."""

from __future__ import annotations

import numpy as np

from tailbound.transport.backoff import AnswerTime
from tailbound.transport.config import MS
from tailbound.transport.flush import (
    FLUSHES,
    PATIENCE,
    PATIENCE_MOST,
    REPEATS,
    SILENT,
    WINDOW,
    Again,
    Places,
    Retry,
    View,
)

PAUSE = 1 * MS


class World:
    """One worker's op of ``rows`` rows: which results are in."""

    def __init__(self, rows: int, index: int = 0, of: int = 1) -> None:
        self.here = np.zeros(rows, bool)
        self.retry = Retry(rows, index, of, AnswerTime(PATIENCE, PATIENCE_MOST))
        self.now = 1_000 * MS
        self.sent = self.finished = self.short = self.due = False

    def missing(self) -> Places:
        return np.flatnonzero(~self.here)

    def turn(self, after: int = 0) -> list[Again]:
        self.now += after
        view = View(int(self.here.sum()), self.missing, self.sent, self.finished, self.short, self.due)
        return self.retry.turn(self.now, view, PAUSE)

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
    world = World(100)
    world.here[:50] = True
    world.here[[3, 7]] = False
    assert places(world.turn()) == []  # they may be on their way
    world.here[50:60] = True
    assert places(world.turn(2 * MS)) == [3, 7]
    assert all(not again.flush for again in world.run(2 * PATIENCE))


def test_nothing_is_asked_for_before_the_first_result_or_beyond_the_last_one() -> None:
    world = World(100)
    world.sent = True
    assert world.run(50 * MS) == []
    world.here[:30] = True
    assert world.run(50 * MS) == []  # seventy rows: somebody is slow, not lost


def test_a_lost_tail_is_asked_for_once_nothing_comes_any_more() -> None:
    world = World(100)
    world.sent = True
    world.here[:95] = True
    assert world.run(20 * MS) == []  # somebody may still be sending
    world.finished = True
    assert set(places(world.run(4 * MS))) == {95, 96, 97, 98, 99}
    assert world.retry.gaps == 5


def test_marks_of_all_tell_a_long_lost_tail_from_a_slow_rank() -> None:
    world = World(100)
    world.sent, world.finished = True, True
    world.here[:30] = True
    assert len(places(world.run(4 * MS))) == 50  # and half of the op's rows is the limit


def test_a_row_is_sent_again_a_few_times_at_growing_intervals() -> None:
    world = World(100)
    world.sent = world.finished = True
    world.here[1:] = True
    times = [world.now for _ in range(400) if world.turn(1 * MS)]
    assert len(times) == REPEATS
    assert all(b > a for a, b in zip(np.diff(times), np.diff(times)[1:], strict=False))


def test_at_the_deadline_each_releases_its_share_and_then_what_is_left() -> None:
    """Rule: clock-28."""
    world = World(9, index=1, of=3)
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
    world = World(10)
    world.sent = world.short = True
    assert world.run(20 * MS) == []
    world.finished = True
    assert places(world.run(3 * MS)) == list(range(10))


def test_a_release_goes_out_in_a_window_that_answers_widen() -> None:
    world = World(5000)
    world.due = True
    sizes = []
    for _ in range(4):
        found = places(world.turn(world.retry.look - world.now if world.retry.look else 0))
        sizes.append(len(found))
        world.here[found] = True
    assert sizes == [WINDOW, 2 * WINDOW, 4 * WINDOW, 8 * WINDOW]


def test_a_switch_that_does_not_answer_is_not_flooded_and_is_heard_when_it_is_back() -> None:
    world = World(20_000)
    world.due = True
    asked = world.run(10_000 * MS)
    assert len(places(asked)) <= (SILENT + 1) * WINDOW
    world.here[:100] = True  # somebody else has reached it
    assert places(world.run(200 * MS))
    assert max(np.bincount(places(asked))) <= FLUSHES
