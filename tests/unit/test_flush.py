"""What is sent to a switch again, and exactly when: gaps, deadlines, shares; with the time passed in (clock-28)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tailbound.transport.backoff import AnswerTime
from tailbound.transport.config import MS
from tailbound.transport.flush import LOOK, PATIENCE, PATIENCE_MOST, Again, Places, Retry, View

PAUSE = 1 * MS


class Worker:
    """One worker's op of ``rows`` rows: which results are in. ``state``: attributes to begin with."""

    def __init__(self, rows: int, index: int = 0, of: int = 1, **state: Any) -> None:
        self.here = np.zeros(rows, bool)
        self.patience = AnswerTime(PATIENCE, PATIENCE_MOST)
        self.retry = Retry(rows, index, of, self.patience)
        self.now = 1_000 * MS
        self.sent = self.finished = self.short = self.due = False
        self.become(**state)

    def become(self, **state: Any) -> None:
        """Attributes; ``here``: rows that come."""
        self.here[state.pop("here", [])] = True
        vars(self).update(state)

    def missing(self) -> Places:
        return np.flatnonzero(~self.here)

    def poll(self, after: int = 0, pause: int = PAUSE) -> list[Again]:
        self.now += after
        view = View(int(self.here.sum()), self.missing, self.sent, self.finished, self.short, self.due)
        return self.retry.poll(self.now, view, pause)

    def turn(self, after: int = 0, pause: int = PAUSE) -> list[int]:
        """The places that are asked for in a turn."""
        return sorted(int(p) for again in self.poll(after, pause) for p in again.places)


@pytest.mark.parametrize(("rows", "pause", "apart"), [(100, 0, LOOK), (100, 3 * MS, 3 * MS), (20_000, PAUSE, 5 * MS)])
def test_rows_are_looked_through_once_a_millisecond_and_less_often_in_large_ops(
    rows: int, pause: int, apart: int
) -> None:
    world = Worker(rows)
    assert world.retry.look == 0
    assert world.turn(pause=pause) == []
    assert world.retry.look == world.now + apart
    world.due = True
    assert world.turn(apart - 1, pause) == []
    assert world.turn(1, pause)


@pytest.mark.parametrize(("sent", "finished", "asked"), [(True, True, 5), (True, False, 0), (False, True, 0)])
def test_a_tail_is_asked_for_after_the_pause_and_only_where_all_is_sent_here_and_there(
    sent: bool, finished: bool, asked: int
) -> None:
    world = Worker(100, sent=sent, finished=finished, here=slice(95))
    assert world.turn() == []
    assert len(world.turn(PAUSE)) == asked


@pytest.mark.parametrize(("lacks", "released"), [(None, 10), ("sent", 0), ("finished", 0), ("short", 0), ("quiet", 0)])
def test_a_release_before_the_deadline_needs_all_to_be_through_and_somebody_to_be_missing(
    lacks: str | None, released: int
) -> None:
    world = Worker(10, **{name: lacks != name for name in ("sent", "finished", "short")})
    assert world.turn() == []
    assert len(world.turn(PAUSE, PAUSE + (lacks == "quiet"))) == released
    assert world.retry.flushing == (released > 0)


def test_a_release_goes_on_and_takes_rows_that_were_asked_for_often_enough() -> None:
    world = Worker(100, sent=True, finished=True, here=slice(1, 50))
    for _ in range(400):
        world.turn(MS)
    assert world.turn(MS) == []
    world.become(short=True)
    assert world.turn(MS) == [0, *range(50, 100)]
    world.become(here=[0, 60], short=False)
    assert world.turn(MS) == []
    assert [(again.flush, len(again.places)) for again in world.poll(PATIENCE)] == [(True, 49)]


@pytest.mark.parametrize(
    ("rows", "state", "turns"),
    [
        (100, {"here": slice(60, 99)},
         [([], 0, 0, 0), ([], PAUSE, 0, 50), ([], PATIENCE - LOOK, 0, 0), ([], LOOK, 0, 16)]),
        (100, {"here": slice(60, 99)}, [([], 0, 0, 0), ([], PAUSE, 0, 50), ([99], PATIENCE, 0, 0)]),
        (2000, {"due": True, "here": slice(10)}, [([], 0, 10, 266), ([1999], 2 * MS, 266, 522)]),
        (2000, {"due": True},
         [([], 0, 0, 256), ([], PATIENCE, 0, 256),
          ([1999], MS, 256, 512),  # the first are waited for twice as long now
          ([], PATIENCE, 0, 0),  # as many as the window has taken after a silence
          ([], PATIENCE, 0, 256)]),
        (2000, {"due": True, "now": 1 * MS},  # on a machine that has just begun
         [([], 0, 0, 256), (slice(200), MS, 256, 712), ([], PATIENCE, 200, 456)]),
    ],
    ids=[
        "when half of the rows are spent a few more are asked for in silence",
        "and none where something comes",
        "rows that may still be answered take part of the window",
        "after a silence the window is as it was",
        "after an answer the next silence is as short as the first",
    ],
)  # fmt: skip
def test_turns(rows: int, state: dict[str, Any], turns: list[tuple[Any, int, int, int]]) -> None:
    """Rows that come, the time that passes, and the first row that is asked for then and the one after the last."""
    world = Worker(rows, **state)
    for here, after, first, end in turns:
        world.become(here=here)
        assert world.turn(after) == [*range(first, end)]


def test_the_other_shares_are_released_when_nothing_has_come_for_as_long_as_answers_take() -> None:
    world = Worker(9, index=1, of=3, due=True)
    assert world.turn() == [1, 4, 7]
    assert world.turn(PATIENCE - LOOK) == []
    assert world.turn(LOOK) == list(range(9))


@pytest.mark.parametrize(("asked", "patience"), [(1, 10 * MS), (2, PATIENCE)])
def test_what_was_asked_for_once_tells_how_long_answers_take(asked: int, patience: int) -> None:
    world = Worker(10, here=slice(1, 10))
    world.turn()
    for _ in range(asked):
        assert world.turn(PATIENCE) == [0]
    world.become(here=[0])
    world.turn(40 * MS)
    assert world.patience.value == patience
