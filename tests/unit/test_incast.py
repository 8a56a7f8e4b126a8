"""Incast: falls on loss above the floor only, rises slowly, and learns what is not its doing (clock-24)."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tailbound.transport.incast import Incast, granted


def feed(incast: Incast, ops: int, loss: float, rows: int = 1000) -> int:
    """Ops of ``rows`` rows that lose a share of them; returns how many may send then."""
    for _ in range(ops):
        incast.update(rows, round(rows * loss))
    return incast.taken


#: Senders; then ops, the share of their rows that is lost, their rows, and how many senders are taken afterwards.
FED: dict[str, tuple[int, list[tuple[int, float, int, int]]]] = {
    "without loss all may send": (7, [(1000, 0.0, 1000, 7)]),
    "a number lasts for four good trials": (
        7, [(8, 0.05, 1000, 4), (31, 0.0, 1000, 4), (1, 0.0, 1000, 5), (31, 0.0, 1000, 5), (1, 0.0, 1000, 6)],
    ),
    "an op is hit by more than what is tolerated": (7, [(4, 0.5, 1000, 7), (4, 0.001, 1000, 7)]),
    "after a fall that was for nothing four good trials are needed too": (
        7, [(8, loss, 10, taken) for loss, taken in [(0.5, 4), (0.3, 2), *[(0.3, 4)] * 4, (0.3, 5)]],
    ),
    "of two senders one may be taken": (2, [(8, 0.2, 5, 1)]),
    "a single sender is no incast": (1, [(16, 0.001, 1000, 1)]),
    "an op without rows is no sample": (7, [(8, 0.0, 0, 7), (7, 1.0, 1, 7), (1, 1.0, 1, 4)]),
    "a number rises by a quarter": (63, [(8, 0.05, 1000, 32), (32, 0.0, 1000, 40)]),
}  # fmt: skip


@pytest.mark.parametrize(("senders", "fed"), FED.values(), ids=FED)
def test_how_many_may_send(senders: int, fed: list[tuple[int, float, int, int]]) -> None:
    incast = Incast(senders)
    assert incast.advertised == senders, "0 changes nothing at those who hear it, so a fall was never taken back"
    for ops, loss, rows, taken in fed:
        assert feed(incast, ops, loss, rows) == taken
    assert incast.advertised == incast.taken
    assert incast.falls == sum(later[3] < one[3] for one, later in pairwise([(0, 0, 0, senders), *fed]))
    assert incast.falls or incast.floor == 0


@pytest.mark.parametrize(("loss", "taken"), [(0.021, 7), (0.022, 4)])
def test_loss_counts_above_twice_the_floor_and_a_little(loss: float, taken: int) -> None:
    incast = Incast(7)
    incast.floor = 0.01
    assert feed(incast, 8, loss) == taken


def test_a_loss_that_is_just_tolerated_belongs_to_the_floor_however_many_ops_it_hits() -> None:
    incast = Incast(7)
    for expected, lost in [(500, 1)] * 5 + [(833, 0), (833, 0), (834, 0)]:
        incast.update(expected, lost)
    assert incast.taken == 7
    assert incast.floor == pytest.approx(0.001 * 8 / 256)


@pytest.mark.parametrize(
    ("rows", "loss", "then", "taken", "floor"),
    [
        *((100, 0.5, [0.35] * less + [0.36], 5, 0.5) for less in (1, 3, 7)),
        (100, 0.5, [0.35] * 8, 3, 0.2 + (0.35 - 0.2) * 8 / 256),
        (10, 0.1, [0.1] * 7 + [0.0], 5, 0.1),
    ],
    ids=[
        *(f"it was for nothing where op {op} loses more than seven tenths as before" for op in (2, 4, 8)),
        "it has helped where seven tenths of the loss are left",
        "it was for nothing where one row of few says little",
    ],
)
def test_whether_a_fall_has_helped(rows: int, loss: float, then: list[float], taken: int, floor: float) -> None:
    """``then``: what each op loses after one of eight that lost ``loss``."""
    incast = Incast(5)
    assert feed(incast, 8, loss, rows) == 3
    incast.floor = 0.2 if rows == 100 else incast.floor
    for lost in then[:-1]:
        assert feed(incast, 1, lost, rows) == 3
    assert feed(incast, 1, then[-1], rows) == taken
    assert incast.floor == pytest.approx(floor)


@pytest.mark.parametrize(("rows", "most"), [(500, 0.12), (3500, 0.04)])
def test_a_cable_that_loses_in_bursts_holds_no_sender_back(rows: int, most: float) -> None:
    """1 % of rows, eight in a row: ops lose from nothing to four times that."""
    limited, ops = 0, 100
    for seed in range(20):
        dice, incast, bad = random.Random(seed), Incast(3), False
        for _ in range(ops):
            lost = 0
            for _ in range(rows):
                bad ^= dice.random() < (1 / 8 if bad else 0.01 / 8 / 0.99)
                lost += bad
            incast.update(rows, lost)
            limited += incast.advertised < 3
    assert limited <= most * 20 * ops


def test_a_number_is_a_share_of_the_link() -> None:
    assert [granted(number, 4) for number in (0, 1, 2, 4, 200)] == [1.0, 0.25, 0.5, 1.0, 1.0]


def test_ranks_that_are_gone_are_no_senders() -> None:
    incast = Incast(7)
    for senders, taken in ((4, 4), (0, 4), (1, 1), (7, 7)):
        incast.follow(senders)
        assert (incast.taken, incast.advertised) == (taken, taken)
    incast.follow(4)
    feed(incast, 8, 0.05)
    incast.follow(7)
    assert incast.taken == 2
