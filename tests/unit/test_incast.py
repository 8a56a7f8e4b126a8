"""Incast: falls on loss above the floor only, rises slowly, and learns what is not its doing (clock-24)."""

from __future__ import annotations

import itertools
import random

import pytest

from tailbound.transport.incast import Incast, allowed


def feed(incast: Incast, ops: int, loss: float, rows: int = 1000) -> None:
    for _ in range(ops):
        incast.observe(rows, round(rows * loss))


def test_without_loss_all_may_send() -> None:
    incast = Incast(7)
    feed(incast, 1000, 0)
    assert (incast.taken, incast.advertised, incast.falls) == (7, 0, 0)


def test_loss_that_goes_with_the_number_keeps_it_low() -> None:
    incast = Incast(7)
    low = []
    for _ in range(4000):
        incast.observe(1000, 30 if incast.taken > 3 else 0)
        low.append(incast.taken <= 3)
    assert sum(low) > 0.6 * len(low)
    assert 1 <= incast.advertised <= 7


def test_it_rises_slowly_again() -> None:
    incast = Incast(7)
    feed(incast, 8, 0.05)
    assert incast.taken == 3
    taken = []
    for _ in range(40):
        feed(incast, 8, 0.0)
        taken.append(incast.taken)
    assert taken == sorted(taken)
    assert max(b - a for a, b in itertools.pairwise(taken)) == 1
    assert taken[-1] == 7
    assert taken[3] <= 4


@pytest.mark.parametrize("loss", [0.01, 0.1])
def test_loss_that_is_always_there_becomes_the_floor(loss: float) -> None:
    incast, rng = Incast(7), random.Random(1)
    below = 0
    for _ in range(3000):
        incast.observe(1000, sum(rng.random() < loss for _ in range(1000)))
        below += incast.taken < 7
    assert incast.floor == pytest.approx(loss, rel=0.4)
    assert incast.taken == 7
    assert below < 0.1 * 3000


def test_foreign_bursts_that_hit_few_ops_are_not_incast() -> None:
    incast, rng = Incast(7), random.Random(1)
    for _ in range(4000):
        incast.observe(1000, 300 if rng.random() < 0.1 else 0)
        assert incast.taken == 7
    assert incast.floor == 0
    feed(incast, 8, 0.3)
    assert incast.taken == 3


def test_one_sender_is_always_taken() -> None:
    incast = Incast(3)
    feed(incast, 8, 0.2)
    assert incast.taken == 1
    single = Incast(1)
    feed(single, 100, 0.5)
    assert single.taken == 1
    incast.observe(0, 0)


def test_senders_obey_the_smallest() -> None:
    assert allowed([0, 0, 0], 3) == 3
    assert allowed([0, 2, 5], 3) == 2
    assert allowed([], 3) == 3
    assert allowed([200], 3) == 3
    assert allowed([], 0) == 1
