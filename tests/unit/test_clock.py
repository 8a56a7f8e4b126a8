"""Stage clocks: majorities, starts, deadlines that move on, quiet (clock-1, clock-3, clock-7, clock-11, clock-12)."""

from __future__ import annotations

import pytest

from tailbound.transport.overtime import Extension
from tailbound.transport.stage import Quiet, majority, stage_start


def test_majority() -> None:
    """Rule: clock-1."""
    assert [majority(live) for live in range(1, 9)] == [1, 2, 2, 3, 3, 4, 4, 5]


@pytest.mark.parametrize(
    ("fewer", "need", "alone", "launched", "start"),
    [
        (0, 0, False, 0, 0),
        (0, 0, True, 0, 0),
        (0, 0, True, 3, 3),  # alone, the own launch is the majority
        (5, 0, False, 0, 0),  # one short of a majority
        (5, 0, False, 9, 9),
        (12, 0, False, 9, 12),
        (5, 7, False, 0, 7),  # a majority of peers, without the own launch
        (5, 7, False, 6, 6),
        (5, 7, False, 30, 7),
        (0, 0, False, 3, 1003),  # at the latest
        (2000, 0, False, 3, 1003),
        (0, 2000, False, 3, 1003),
    ],
)
def test_what_starts_a_clock(fewer: int, need: int, alone: bool, launched: int, start: int) -> None:
    """Rule: clock-3."""
    heard = {"heard_fewer": fewer, "heard_need": need}
    assert stage_start(**heard, alone=alone, launched=launched, start_max=1000) == start


@pytest.mark.parametrize(
    "looks",
    [
        # to see whether rows come in the last tenth
        [(1050, 7, False, 1090), (1090, 7, False, 1100), (1100, 7, True, None)],
        [(1090, 0, False, None), (1095, 5, False, None), (1100, 5, False, None)],
        [(1050, 1, False, 1090), (1090, 5, False, None), (1100, 5, True, None)],
        [(1090, 1, False, 1100), (1100, 2, False, 1110), (1110, 3, False, 1120), (1120, 3, True, None)],
    ],
    ids=[
        "without progress it is kept",
        "the last tenth counts from the first look in it",
        "what came before it is too early to count",
        "it moves on by a tenth while rows come",
    ],
)
def test_a_deadline_moves_on_while_rows_come(looks: list[tuple[int, int, bool, int | None]]) -> None:
    """When is looked, how many rows there are then, whether it has passed, and the next look. Rule: clock-7c."""
    clock = Extension()
    assert not clock.expired(10**12, 0, 1), "it has not begun"
    clock.start(1000, 100, 500)
    for now, rows, expired, again in looks:
        assert clock.expired(now, rows, 1) == expired, now
        assert again is None or clock.next_look(now) == again


def test_begin_counts_once() -> None:
    clock = Extension()
    assert clock.due == clock.promised == clock.length == clock.limit == clock.next_look(5) == 0  # not yet
    clock.start(1000, 100, 500)
    clock.start(2000, 300, 500)
    assert (clock.due, clock.limit, clock.next_look(1089)) == (1100, 1500, 1090)


def test_waiting_on_is_weighed_by_whether_rows_came_at_all() -> None:
    """Rule: clock-29."""
    asked = []

    def worth(rows: bool) -> bool:
        asked.append(rows)
        return len(asked) < 3

    clock, unseen = Extension(), Extension()
    for each in (clock, unseen):
        each.start(1000, 100, 500)
    clock.expired(1090, 0, 9, worth=worth)
    assert [clock.expired(now, 3, 6, worth=worth) for now in (1100, 1110, 1120)] == [False, False, True]
    assert unseen.expired(1100, 3, 6, worth=worth)
    assert asked == [True, False, False, False]


def test_quiet_begins_anew_with_every_packet_and_counts_only_when_all_have_finished() -> None:
    quiet = Quiet()
    looks = [(100, False, 5), (200, False, 5), (210, True, 5), (219, True, 6), (228, True, 6), (229, True, 6)]
    looks += [(240, False, 6), (250, True, 6)]  # somebody is waited for again
    assert quiet.next_look(10) == 0
    assert [now for now, finished, packets in looks if quiet.passed(now, finished, packets, 10)] == [229]
