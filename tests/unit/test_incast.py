"""Incast: falls on loss above the floor only, rises slowly, and learns what is not its doing (clock-24)."""

from __future__ import annotations

import pytest

from tailbound.transport.incast import Incast, granted


def feed(incast: Incast, ops: int, loss: float, rows: int = 1000) -> None:
    for _ in range(ops):
        incast.update(rows, round(rows * loss))


def test_without_loss_all_may_send() -> None:
    incast = Incast(7)
    feed(incast, 1000, 0)
    assert (incast.taken, incast.advertised, incast.falls) == (7, 7, 0)


def test_a_number_lasts_for_four_good_trials() -> None:
    incast = Incast(7)
    feed(incast, 8, 0.05)
    feed(incast, 26, 0.0)
    assert incast.taken == 4
    feed(incast, 1, 0.0)
    assert incast.taken == 5
    feed(incast, 31, 0.0)
    assert incast.taken == 5
    feed(incast, 1, 0.0)
    assert incast.taken == 6


def test_loss_counts_above_twice_the_floor_and_a_little() -> None:
    for loss, taken in ((0.021, 7), (0.022, 4)):
        incast = Incast(7)
        incast.floor = 0.01
        feed(incast, 8, loss)
        assert incast.taken == taken


def test_an_op_is_hit_by_more_than_what_is_tolerated() -> None:
    """Half of the ops are: not often enough, however much they lose."""
    incast = Incast(7)
    feed(incast, 4, 0.5)
    feed(incast, 4, 0.001)
    assert (incast.taken, incast.floor) == (7, 0)


def test_a_loss_that_is_just_tolerated_belongs_to_the_floor_however_many_ops_it_hits() -> None:
    incast = Incast(7)
    for expected, lost in [(500, 1)] * 5 + [(833, 0), (833, 0), (834, 0)]:
        incast.update(expected, lost)
    assert incast.taken == 7
    assert incast.floor == pytest.approx(0.001 * 8 / 256)


@pytest.mark.parametrize(("left", "taken"), [(0.35, 3), (0.36, 5)])
def test_a_fall_that_leaves_seven_tenths_of_the_loss_has_helped(left: float, taken: int) -> None:
    incast = Incast(5)
    feed(incast, 8, 0.5, rows=100)
    assert incast.taken == 3
    incast.floor = 0.2
    feed(incast, 3, left, rows=100)
    assert incast.taken == taken
    assert incast.floor == (0.36 if taken == 5 else pytest.approx(0.2 + (0.35 - 0.2) * 8 / 256))


def test_after_a_fall_that_was_for_nothing_four_good_trials_are_needed_too() -> None:
    incast, taken = Incast(7), []
    for loss in (0.5, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3):
        feed(incast, 8, loss, rows=10)
        taken.append(incast.taken)
    assert taken == [4, 2, 4, 4, 4, 4, 5]


def test_of_two_senders_one_may_be_taken() -> None:
    pair = Incast(2)
    feed(pair, 8, 0.2, rows=5)
    assert (pair.taken, pair.falls) == (1, 1)


def test_a_single_sender_is_no_incast_and_an_op_without_rows_no_sample() -> None:
    single = Incast(1)
    feed(single, 16, 0.001)
    assert (single.taken, single.floor) == (1, 0)
    incast = Incast(7)
    feed(incast, 8, 0.0, rows=0)
    feed(incast, 7, 1.0, rows=1)
    assert incast.taken == 7
    feed(incast, 1, 1.0, rows=1)
    assert incast.taken == 4


def test_a_number_is_a_share_of_the_link() -> None:
    assert [granted(number, 4) for number in (0, 1, 2, 4, 200)] == [1.0, 0.25, 0.5, 1.0, 1.0]


def test_the_number_is_always_said() -> None:
    """0 changes nothing at those who hear it, so a fall was never taken back."""
    assert [Incast(n).advertised for n in (1, 7, 255)] == [1, 7, 255]


def test_ranks_that_are_gone_are_no_senders() -> None:
    incast = Incast(7)
    for senders, taken in ((4, 4), (0, 4), (1, 1), (7, 7)):
        incast.follow(senders)
        assert (incast.taken, incast.advertised) == (taken, taken)
    incast.follow(4)
    feed(incast, 8, 0.05)
    incast.follow(7)
    assert incast.taken == 2


def test_a_number_rises_by_a_quarter() -> None:
    incast = Incast(63)
    feed(incast, 8, 0.05)
    assert incast.taken == 32
    feed(incast, 32, 0.0)
    assert incast.taken == 40
