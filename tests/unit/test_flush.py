"""What is sent to a switch again, and exactly when: gaps, deadlines, shares; with the time passed in (clock-28)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tailbound.transport.config import MS
from tailbound.transport.flush import LOOK, PATIENCE, Places, Retry

PAUSE = 1 * MS


class Worker:
    """One worker's op of ``rows`` rows: which results are in. ``state``: attributes to begin with."""

    def __init__(self, rows: int, index: int = 0, of: int = 1, **state: Any) -> None:
        self.here = np.zeros(rows, bool)
        self.retry = Retry(rows, index, of)
        self.now = 1_000 * MS
        self.sent = self.finished = self.short = self.due = False
        self.become(**state)

    def become(self, **state: Any) -> None:
        """Attributes; ``here``: rows that come."""
        self.here[state.pop("here", [])] = True
        vars(self).update(state)

    def missing(self) -> Places:
        return np.flatnonzero(~self.here)

    def turn(self, after: int = 0, pause: int = PAUSE) -> list[int]:
        """The places that are asked for in a turn."""
        self.now += after
        state = {name: getattr(self, name) for name in ("sent", "finished", "short", "due")}
        return sorted(map(int, self.retry.poll(self.now, pause, int(self.here.sum()), self.missing, **state)))


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
    assert len(world.turn(PATIENCE)) == 49
    assert world.retry.flushing


#: Rows of an op and the state of its worker; then turns: rows that come, the time that passes, and what is asked for.
TURNS: dict[str, tuple[int, dict[str, Any], list[tuple[Any, int, Any]]]] = {
    "a tail is asked for after the pause": (
        100, {"sent": True, "finished": True, "here": slice(95)}, [([], 0, ()), ([], PAUSE, range(95, 100))],
    ),
    "but not before all is sent there": (100, {"sent": True, "here": slice(95)}, [([], 0, ()), ([], PAUSE, ())]),
    "nor before all is sent here": (100, {"finished": True, "here": slice(95)}, [([], 0, ()), ([], PAUSE, ())]),
    "when half of the rows are spent a few more are asked for in silence": (
        100, {"here": slice(60, 99)},
        [([], 0, ()), ([], PAUSE, range(50)), ([], PATIENCE - LOOK, ()), ([], LOOK, range(16))],
    ),
    "and none where something comes": (
        100, {"here": slice(60, 99)}, [([], 0, ()), ([], PAUSE, range(50)), ([99], PATIENCE, ())],
    ),
    "rows that may still be answered take part of the window": (
        2000, {"due": True, "here": slice(10)}, [([], 0, range(10, 266)), ([1999], 2 * MS, range(266, 522))],
    ),
    "after a silence the window is as it was": (
        2000, {"due": True},
        [([], 0, range(256)), ([], PATIENCE, range(256)),
         ([1999], MS, range(256, 512)),
         ([], PATIENCE, range(256)), ([], PATIENCE, ()),  # twice as long now
         ([], PATIENCE, range(256))],
    ),
    "after an answer the next silence is as short as the first": (
        2000, {"due": True, "now": 1 * MS},  # on a machine that has just begun
        [([], 0, range(256)), (slice(200), MS, range(256, 712)), ([], PATIENCE, range(200, 456))],
    ),
    "other shares are released when nothing has come for as long as answers take": (
        9, {"index": 1, "of": 3, "due": True}, [([], 0, (1, 4, 7)), ([], PATIENCE - LOOK, ()), ([], LOOK, range(9))],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "state", "turns"), TURNS.values(), ids=TURNS)
def test_turns(rows: int, state: dict[str, Any], turns: list[tuple[Any, int, Any]]) -> None:
    world = Worker(rows, **state)
    for here, after, asked in turns:
        world.become(here=here)
        assert world.turn(after) == [*asked]
