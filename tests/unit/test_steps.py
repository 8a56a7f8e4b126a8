"""In step, behind, lost (clock-20)."""

from __future__ import annotations

import pytest

from tailbound.transport.steps import Steps, label_text, step_distance
from tailbound.wire.schema import OP_STEPS, op_label


def standing(own: int, *newest: int, rows: tuple[int, ...] = (), ring: int = 1000, first: int = 0) -> Steps:
    """Own next op ``first`` of step ``own``; the others are in the fourth op of theirs. ``rows``: of a step's ops."""
    most = max(newest, default=own, key=lambda n: step_distance(n, own))
    return Steps(op_label(own, first), op_label(most, 3), rows, ring)


def test_in_step_with_nobody_and_with_equals() -> None:
    assert standing(7).in_step
    assert standing(7, 7, 6).in_step
    assert not standing(7).lost
    assert standing(7, 6).behind == 0


def test_a_peer_one_op_on_may_be_a_step_on() -> None:
    assert Steps(op_label(7, 1023), op_label(8, 0), (), 1000).behind == 1
    assert Steps(op_label(5, 0), op_label(8, 0), (), 1000).behind == 3


def test_behind_by_the_newest_live_rank() -> None:
    steps = standing(7, 6, 9, 8)
    assert (steps.own, steps.behind) == (7, 2)
    assert not steps.in_step


def test_lost_when_the_ring_cannot_hold_what_lies_between() -> None:
    assert not standing(7, 8, rows=(100,) * 5).lost
    assert not standing(7, 8, rows=(111,) * 5).lost  # nine ops of it, up to the one that they are in
    assert standing(7, 8, rows=(112,) * 5).lost
    assert standing(7, 9, rows=(100,) * 5).lost
    assert not standing(7, 9, rows=(71,) * 5).lost
    assert not standing(7, 9, rows=(100,) * 5, first=4).lost


def test_in_step_nobody_is_lost_however_small_the_ring() -> None:
    """A step that is larger than the ring goes through it op by op; only who is a step behind cannot have all of it."""
    for rows in ((2000,), (400,) * 5):
        assert not standing(7, 7, 6, rows=rows).lost
        assert not standing(7, rows=rows).lost
        assert standing(7, 8, rows=rows).lost


def test_lost_when_the_records_are_gone_and_no_step_is_known() -> None:
    assert not standing(7, 7 + OP_STEPS - 1).lost
    assert standing(7, 7 + OP_STEPS).lost
    assert not standing(7, 7 + OP_STEPS, rows=(1,)).lost


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        (0, 0x3FFFFF, 1),
        (0x3FFFFF, 0, -1),
        (5, 3, 2),
        (0x3FFFFE, 2, -4),
        (0x1FFFFF, 0, 0x1FFFFF),
        (0x200000, 0, -0x200000),
    ],
)
def test_steps_are_serial_numbers(a: int, b: int, distance: int) -> None:
    assert step_distance(a, b) == distance
    assert standing(b, a).behind == max(0, distance)


def test_labels_are_read_as_step_and_index() -> None:
    assert [label_text(op_label(*each)) for each in ((0, 0), (7, 3), (6, 1023))] == ["0.0", "7.3", "6.1023"]
