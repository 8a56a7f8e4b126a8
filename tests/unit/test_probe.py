"""Probes: when, what, and which echoes count."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from tailbound.transport.probe import EVERY, LOST, MUTE, Echo, Prober
from tailbound.wire.packets import DTYPES

MS = 1_000_000


def make(by: Any = "kernel") -> tuple[Prober, np.ndarray]:
    states = np.zeros(256, DTYPES["tb_peer_state"])
    return Prober(77, 2, [3, 0], states, by), states


@pytest.mark.parametrize(("by", "left"), [("kernel", 21 * MS), ("thread", 12 * MS)])
def test_the_wait_in_own_queues_is_no_part_of_a_round_trip(by: Any, left: int) -> None:
    """A thread's echo waits behind its own rank's rows, as the probe did here: twice."""
    prober, states = make(by)
    for rtt, found in ((30 * MS, left), (5 * MS, 1)):
        prober.packet(3, 0, held=9 * MS)
        states["rtt_ns"][3] = rtt
        assert prober.collect(40 * MS) == [Echo(3, found, rtt, ANY, 0.0)]


def test_one_is_on_the_way_and_the_next_follows_after_some_bytes() -> None:
    prober, states = make()
    assert prober.left(3, 0, 0, 0, False)
    prober.packet(3, 0)
    assert not prober.left(3, 10 * EVERY, 1300, MS, False)
    assert prober.left(0, 0, 0, MS, False)
    assert prober.collect(MS) == []
    states["rtt_ns"][3] = 400_000
    assert prober.collect(MS) == [Echo(3, 400_000, 400_000, EVERY, 0.0)]
    assert prober.collect(MS) == []
    assert prober.left(3, 0, 0, 2 * MS, False)
    prober.packet(3, 2 * MS)
    states["rtt_ns"][3] = 500_000
    assert prober.collect(3 * MS) == [Echo(3, 500_000, 500_000, 10 * EVERY, 0.0)]
    assert not prober.left(3, EVERY - 1, 130, 4 * MS, False)
    assert prober.left(3, 0, 0, 4 * MS, True)
    assert prober.by == "kernel"


def test_a_lost_one_is_given_up_and_its_late_echo_is_not_taken_for_the_next() -> None:
    prober, states = make()
    prober.packet(3, 0)
    assert not prober.left(3, EVERY, 130, LOST - 1, False)
    assert prober.left(3, 0, 0, LOST, False)
    assert prober.lost == 1
    prober.packet(3, LOST)
    states["rtt_ns"][3] = LOST + MS  # of the first
    assert prober.collect(LOST + MS) == []
    states["rtt_ns"][3] = 2 * MS
    assert prober.collect(LOST + 2 * MS) == [Echo(3, 2 * MS, 2 * MS, EVERY, 0.0)]


@pytest.mark.parametrize(("by", "ways"), [("kernel", 1), ("thread", 2)])
def test_one_that_waits_in_own_queues_is_not_lost_yet(by: Any, ways: int) -> None:
    """Each was replaced before its echo came, so that nothing was known of a path while own queues were long."""
    prober, _ = make(by)
    prober.packet(3, 0, held=60 * MS)
    assert not prober.left(3, EVERY, 130, LOST + ways * 60 * MS - 1, False)
    assert prober.left(3, 0, 0, LOST + ways * 60 * MS, False)


def test_where_no_echo_ever_comes_probes_become_rare() -> None:
    prober, _ = make()
    now, sent = 0, 0
    for _ in range(100 * MUTE):
        if prober.left(3, EVERY, 130, now, False):
            prober.packet(3, now)
            sent += 1
        now += LOST
    assert MUTE < sent < 2.1 * MUTE
    assert prober.by == "nobody"


def test_an_echo_says_how_many_packets_were_marked() -> None:
    prober, states = make()
    shares = []
    for told, count in ((0xFFFFFFF0, 99), (0xFFFFFFF0, 99), (4, 99), (1000, 99), (1000, 0)):
        now = (1 + len(shares)) * 10 * MS
        assert prober.left(3, EVERY, count, now, False)
        prober.packet(3, now)
        states["told"][3], states["rtt_ns"][3] = told, MS + len(shares)
        (echo,) = prober.collect(now + 2 * MS)
        shares.append(echo.marked)
    assert shares == [0.0, 0.0, 0.2, 1.0, 0.0]  # the first says where its count begins
    assert prober.marked == 20 + 996


def test_a_count_that_began_anew_is_no_share() -> None:
    """A peer that comes back counts from 0: 0 after 500 was taken for four billion marks."""
    prober, states = make()
    for i, told in enumerate((500, 0, 30)):
        now = (1 + i) * 10 * MS
        prober.left(3, EVERY, 99, now, False)
        prober.packet(3, now)
        states["told"][3], states["rtt_ns"][3] = told, MS + i
        (echo,) = prober.collect(now + 2 * MS)
        assert echo.marked == (0.3 if told == 30 else 0.0)
    assert prober.marked == 30


def test_after_a_lost_probe_marks_are_those_of_both_intervals() -> None:
    prober, states = make()
    prober.packet(3, 0)
    states["rtt_ns"][3] = MS
    prober.collect(2 * MS)
    for now in (10 * MS, 10 * MS + LOST):
        assert prober.left(3, EVERY, 99, now, False)
        prober.packet(3, now)
    assert prober.missed[3] == 1
    states["told"][3], states["rtt_ns"][3] = 100, 2 * MS
    assert prober.collect(20 * MS + LOST) == [Echo(3, 2 * MS, 2 * MS, EVERY, 0.5)]
    assert prober.missed[3] == 0
