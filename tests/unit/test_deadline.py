"""Deadlines learned from samples (clock-3 to clock-6, clock-10, clock-11, clock-26)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_world import OpWorld
from tailbound.transport.config import FLOOR, MS, Config
from tailbound.transport.deadline import WARM_UP_OPS, WINDOW, Deadlines, Sample, quantile
from tailbound.transport.steps import STEP_MASK
from tailbound.wire.packets import record_of
from tailbound.wire.schema import OWN_OP, TIME_UNIT_US, op_label

BIG, SMALL = 1_600_000, 3_000
#: Of what headers say of D1, ns; the step of an op.
UNIT, STEP = TIME_UNIT_US * 1000, 1
_Op = record_of(OWN_OP)


class Rank(OpWorld):
    """Rank 0 of nine with an op, flows of ``size``, to which it applies what it has learned (``deadline.c``)."""

    def __init__(self, learned: Deadlines, size: int = BIG, **config: int) -> None:
        super().__init__(9, **config)
        self.op, self.terms.advertised = _Op(label=op_label(STEP, 3)), learned.advertised
        learned.tell(self.op, size)

    def hears(self, *heard: int, newest: int = 0) -> tuple[int, int, int]:
        """D1, the longest D1 of an owner and R - c, ns.

        Others, from rank 1 on, advertise D1 (in ``UNIT``; 0: nothing), and have named ``newest``.
        """
        states, at = self.store.peer_states, (self.terms.pointer, ctypes.addressof(self.op))
        states["newest"], states["deadline"][1 : len(heard) + 1] = newest or self.op.label, heard
        self.known.follow()
        return self.fast.tb_lasts(*at, 0), self.fast.tb_longest(*at, 1), self.fast.tb_lasts(*at, 1)


def learned(count: int = 0, size: int = BIG, settings: dict[str, int] | None = None, **values: Any) -> Deadlines:
    deadlines = Deadlines(Config(0, 4, **settings or {}))
    feed(deadlines, count, size, **values)
    return deadlines


def feed(deadlines: Deadlines, count: int, size: int = BIG, **values: Any) -> None:
    for _ in range(count):
        deadlines.learn(Sample(size, **({"first": 2 * MS, "transfer": 8 * MS, "results": 6 * MS} | values)))


def observe(deadlines: Deadlines, steps: range, size: int = BIG, places: int = 1, **values: Any) -> None:
    """``places`` ops in each of ``steps``; a value may be a function of step and place."""
    for step in steps:
        for place in range(places):
            given = {name: value(step, place) if callable(value) else value for name, value in values.items()}
            sample = {"first": 2 * MS, "transfer": 8 * MS, "results": 30 * MS} | given
            deadlines.learn(Sample(size, step=step, **sample))


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=500))
def test_a_quantile_of_a_window(values: list[int]) -> None:
    kept = values[-WINDOW:]
    found = quantile(kept)
    assert found in kept
    assert sum(v <= found for v in kept) >= 0.95 * len(kept) > sum(v < found for v in kept)


def test_deadlines_of_a_new_size_are_the_whole_stage_then_long_then_what_was_learned() -> None:
    """A rank without rows has no arrivals, and goes by what others advertise. Rules: clock-5, clock-11, clock-26."""
    d = learned(50, first=None, transfer=None, results=6 * MS)
    assert (d.advertised, Rank(d).hears()[1], Rank(d).hears(300, 900)[1]) == (0, 2000 * MS, 900 * UNIT)
    d = learned(4, first=None, transfer=None, results=None)
    assert d.stage_one(BIG) == d.stage_two(BIG) == learned().advertised == 2000 * MS
    d = learned(4)
    assert d.stage_one(BIG) == d.stage_two(BIG) == d.advertised == 2000 * MS
    assert Rank(d).hears(99, 99)[:2] == (2000 * MS, 2000 * MS)  # whatever is heard
    feed(d, 1)
    assert d.stage_one(BIG) == d.advertised == pytest.approx(4 * 1.25 * (2 + 8) * MS, rel=1e-3)
    assert d.stage_two(BIG) == 4 * FLOOR
    feed(d, WARM_UP_OPS - 6)
    assert not d.warm(BIG)
    assert d.stage_one(BIG) > 45 * MS
    feed(d, 1)
    assert d.warm(BIG)
    assert not d.warm(SMALL)
    assert d.stage_one(SMALL) == 2000 * MS
    assert d.stage_one(BIG) == pytest.approx(1.25 * (2 + 8) * MS, rel=1e-3)
    assert d.stage_two(BIG) == FLOOR  # 7.5 ms would do


def test_a_lower_floor_lets_deadlines_follow_what_short_ops_take() -> None:
    """clock-36: an op of a fraction of a millisecond; R is two floors after D1 at least."""
    times = {"first": MS // 20, "transfer": MS // 10, "results": MS // 10}
    usual, low = learned(WARM_UP_OPS, **times), learned(WARM_UP_OPS, settings={"floor": MS // 10}, **times)
    assert usual.stage_one(BIG) == usual.stage_two(BIG) == FLOOR
    assert low.stage_one(BIG) == pytest.approx(1.25 * 0.15 * MS, rel=1e-3)
    assert low.stage_two(BIG) == pytest.approx(1.25 * 0.1 * MS, rel=1e-3)
    assert Rank(low, floor=MS // 10).hears()[2] == low.stage_one(BIG) + MS // 10 + low.stage_two(BIG)
    assert (usual.quiet, low.quiet) == (MS, MS // 100)


def test_what_hits_a_minority_of_steps_moves_no_deadline_and_a_change_is_followed() -> None:
    """Foreign bursts: one step in four takes three times as long; p95 would wait for all of them."""
    d = learned()

    def burst(length: int) -> Callable[[int, int], int]:
        return lambda step, place: length * (3 if step % 4 == 3 else 1)

    observe(d, range(60), places=4, transfer=burst(8 * MS), results=burst(30 * MS))
    assert d.stage_one(BIG) == pytest.approx(1.25 * 10 * MS, rel=1e-3)
    assert d.stage_two(BIG) == pytest.approx(1.25 * 30 * MS, rel=1e-3)
    d = learned()  # what a place of the step always takes is waited for
    observe(d, range(30), places=4, transfer=lambda step, place: (24 if place == 2 else 8) * MS)
    assert d.stage_one(BIG) == pytest.approx(1.25 * 26 * MS, rel=1e-3)
    d, found = learned(), []
    observe(d, range(100))
    for step in range(100, 104):
        observe(d, range(step, step + 1), transfer=160 * MS, results=600 * MS)
        found.append(d.stage_one(BIG))
    assert found[2] < 15 * MS
    assert found[3] == pytest.approx(1.25 * 162 * MS, rel=1e-3)


def test_a_receiver_leaves_room_for_the_last_seal() -> None:
    """Results of an owner that waits for its deadline have time to come, and are sent for as long."""
    d, op = learned(), SimpleNamespace()
    d.tell(op, BIG)
    assert op.worth == 2000 * MS
    observe(d, range(40))
    assert Rank(d).hears()[2] == pytest.approx((12.5 + 10 + 37.5) * MS, rel=1e-3)
    assert Rank(d).hears(200 * MS // UNIT)[2] == pytest.approx((200 + 20 + 37.5) * MS, rel=1e-3)
    assert Rank(d, stage_max=40 * MS).hears(9999)[2] == 2 * 40 * MS
    d.tell(op, BIG)
    assert op.worth == pytest.approx(2 * 1.25 * 30 * MS, rel=1e-3)


def test_another_owner_map_makes_flows_longer_and_forgets_nothing() -> None:
    d, size = learned(), 1_800_000
    third = size * 4 // 3
    assert third.bit_length() == size.bit_length() + 1
    feed(d, 40, size, transfer=40 * MS, results=30 * MS)
    assert d.warm(third)
    assert d.stage_one(third) == pytest.approx(1.25 * (2 + 40 * 4 / 3) * MS, rel=1e-2)
    assert d.stage_two(third) == pytest.approx(1.25 * 30 * 4 / 3 * MS, rel=1e-2)
    feed(d, 1, third, transfer=60 * MS, results=45 * MS)
    assert d.stage_two(third) < 100 * MS
    assert not d.warm(8 * size)


def test_sizes_learn_their_transfer_apart_and_share_the_skew() -> None:
    """Two packets that took a millisecond say nothing about the seconds per byte of a thousand."""
    d = learned(30)
    feed(d, 30, SMALL, transfer=1 * MS)
    assert d.transfer(BIG) == pytest.approx(10 * MS, rel=1e-3)
    assert d.transfer(SMALL) == pytest.approx(1.25 * MS, rel=1e-3)
    assert d.stage_one(SMALL) == FLOOR
    assert d.advertised == d.stage_one(BIG)  # ranks compare the largest, as long as it comes
    feed(d, WINDOW, SMALL, transfer=1 * MS)
    assert d.advertised == FLOOR


def test_skew_is_capped_by_what_the_last_rank_is_worth_and_d_start_follows_the_own_computing() -> None:
    """Rules: clock-3, clock-4."""
    d = learned(30, first=300 * MS)
    assert (d.skew, d.start_max) == (375 * MS, 1000 * MS)  # no step has been seen
    for step in range(10):
        for last in (False, True):
            now = (600 * step + 100 * last) * MS
            d.step(step, now + 1, now + 2 * MS, last=last)
    assert d.skew_max == d.skew == 200 * MS
    assert d.stage_one(BIG) == pytest.approx(210 * MS, rel=1e-3)
    assert d.start_max == 4 * (598 * MS + 1)
    d = learned(95)
    for rare, skew in ((5, 2.5 * MS), (1, 50 * MS)):
        feed(d, rare, first=40 * MS)
        assert d.skew == skew
    d = learned(30, transfer=1700 * MS)  # of a transfer nothing is taken off but by ``stage_max``
    assert d.stage_one(BIG) == 2000 * MS


def test_the_lower_median_is_applied() -> None:
    """Rule: clock-6."""
    d = learned(30)
    for heard, first, longest in (
        ((), 0, 0), ((900,), 0, 900), ((175,), 175, 0), ((900, 800), 800, 900), ((900, 800, 9999), 800, 9999),
    ):  # fmt: skip
        assert Rank(d).hears(*heard)[:2] == (first * UNIT or d.advertised, longest * UNIT or d.advertised)
    d = learned(30, transfer=80 * MS)  # a smaller op takes off what its transfer is shorter by
    feed(d, 30, SMALL, transfer=1 * MS)
    assert Rank(d, SMALL).hears(2400, 2400)[0] == 2400 * UNIT + d.stage_one(SMALL) - d.stage_one(BIG)
    assert Rank(d, SMALL).hears(300, 300)[0] == FLOOR


def test_those_count_that_are_waited_for_and_were_heard_in_the_last_two_steps() -> None:
    """D1: where contributions are waited for; R: where results are. None in a cold op. Rules: clock-6, clock-26."""
    rank, heard = Rank(d := learned(30)), (1000, 900, 800, 0)
    assert rank.hears(*heard)[:2] == (800 * UNIT, 1000 * UNIT)  # of four
    rank.known.membership.contribution.accuse(3, 0)
    rank.known.membership.result.accuse(1, 0)
    assert rank.hears(*heard)[:2] == (900 * UNIT, 900 * UNIT)
    for steps, first in ((2, 900 * UNIT), (3, d.advertised)):
        assert rank.hears(*heard, newest=op_label(STEP - steps & STEP_MASK, 0))[0] == first
    rank.store.peer_states["cookie"][2] += 1  # of another job
    assert rank.hears(*heard)[:2] == (d.advertised, 800 * UNIT)
    rank.op.cold = 1
    assert rank.hears(*heard)[::2] == (2000 * MS, 4000 * MS)


@given(st.lists(st.integers(0, 0xFFFF), max_size=8), st.integers(1, 10**9), st.integers(0, 10**9))
def test_an_owners_deadline_lies_inside_its_receivers(heard: list[int], transfer: int, first: int) -> None:
    """Rule: clock-11."""
    d = learned(30, transfer=transfer, first=first)
    applied, longest, end = Rank(d).hears(*heard)
    assert FLOOR <= applied <= longest <= 2000 * MS
    assert end > applied + FLOOR


def test_given_deadlines_stay() -> None:
    d = learned(settings=(settings := {"deadline_1": 30 * MS, "deadline_2": 40 * MS, "quiet": 3 * MS}))
    feed(d, 100, first=500 * MS, results=500 * MS)
    d.round_trip(5 * MS)
    assert (d.stage_one(BIG), d.stage_two(BIG), d.quiet) == (30 * MS, 40 * MS, 3 * MS)
    assert Rank(d, **settings).hears(1, 8000)[:2] == (30 * MS, 8000 * UNIT)


def test_quiet_is_two_of_the_smallest_round_trips_of_late() -> None:
    """Rule: clock-10."""
    d = learned()
    assert d.quiet == FLOOR // 10
    for rtt, quiet in ((3, 6), (4, 6), (2, 4), (0.1, 1)):
        d.round_trip(int(rtt * MS))
        assert d.quiet == quiet * MS
    for _ in range(32):
        d.round_trip(5 * MS)
    assert d.quiet == 10 * MS
