"""Stage clocks: majorities, starts, deadlines that move on, quiet (clock-1, clock-3, clock-7, clock-11, clock-12)."""

from __future__ import annotations

import pytest

from tailbound.transport.overtime import Extension
from tailbound.transport.stage import Quiet, majority, stage_start


@pytest.mark.parametrize(("live", "need"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (6, 4), (7, 4), (8, 5)])
def test_majority(live: int, need: int) -> None:
    """Rule: clock-1."""
    assert majority(live) == need


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


def test_a_deadline_without_progress_is_kept() -> None:
    clock = Extension()
    assert not clock.expired(10**12, 0, 1)  # not begun
    assert clock.next_look(5) == 0
    clock.start(1000, 100, 500)
    assert not clock.expired(1050, 7, 1)
    assert clock.next_look(1050) == 1090  # to see whether rows come in the last tenth
    assert not clock.expired(1090, 7, 1)
    assert clock.next_look(1090) == 1100
    assert clock.expired(1100, 7, 1)


def test_the_last_tenth_counts_from_the_first_look_in_it() -> None:
    """Rule: clock-7c."""
    clock = Extension()
    clock.start(1000, 100, 500)
    assert clock.next_look(1089) == 1090
    assert clock.next_look(1090) == 1100
    assert not clock.expired(1090, 0, 1)
    assert not clock.expired(1095, 5, 1)
    assert not clock.expired(1100, 5, 1)
    other = Extension()
    other.start(1000, 100, 500)
    assert not other.expired(1050, 1, 1)  # too early to count
    assert not other.expired(1090, 5, 1)
    assert other.expired(1100, 5, 1)


def test_waiting_on_is_weighed_by_whether_rows_came_at_all() -> None:
    """Rule: clock-29."""
    asked = []

    def worth(rows: bool) -> bool:
        asked.append(rows)
        return len(asked) < 3

    clock = Extension()
    clock.start(1000, 100, 500)
    clock.expired(1090, 0, 9, worth=worth)
    assert not clock.expired(1100, 3, 6, worth=worth)
    assert not clock.expired(1110, 3, 6, worth=worth)
    assert clock.expired(1120, 3, 6, worth=worth)
    unseen = Extension()
    unseen.start(1000, 100, 500)
    assert unseen.expired(1100, 3, 6, worth=worth)
    assert asked == [True, False, False, False]


def test_begin_counts_once() -> None:
    clock = Extension()
    assert clock.due == clock.promised == clock.length == clock.limit == 0  # not yet
    clock.start(1000, 100, 500)
    clock.start(2000, 300, 500)
    assert (clock.due, clock.limit) == (1100, 1500)


def test_a_deadline_moves_on_by_a_tenth_while_rows_come() -> None:
    """Rule: clock-7c."""
    clock = Extension()
    clock.start(1000, 100, 500)
    clock.expired(1090, 1, 1)
    assert not clock.expired(1100, 2, 1)
    assert clock.due == 1110
    assert not clock.expired(1110, 3, 1)
    assert clock.due == 1120
    assert clock.expired(1120, 3, 1)


def test_quiet_begins_anew_with_every_packet_and_counts_only_when_all_have_finished() -> None:
    quiet = Quiet()
    assert not quiet.passed(100, False, 5, 10)
    assert quiet.next_look(10) == 0
    assert not quiet.passed(200, False, 5, 10)
    assert not quiet.passed(210, True, 5, 10)
    assert not quiet.passed(219, True, 6, 10)
    assert not quiet.passed(228, True, 6, 10)
    assert quiet.passed(229, True, 6, 10)
    assert not quiet.passed(240, False, 6, 10)  # somebody is waited for again
    assert not quiet.passed(250, True, 6, 10)
