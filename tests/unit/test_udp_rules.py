"""Rules that take several packets to see, in the udp datapath: the same cases as the kernel's."""

from __future__ import annotations

import pytest

import rule_cases
from udp_world import World


def test_a_wrong_exponent_does_not_stay() -> None:
    rule_cases.check_exponent(World())


def test_a_complete_row_that_begins_again() -> None:
    rule_cases.check_complete_again(World())


def test_a_row_counts_once() -> None:
    rule_cases.check_counted_once(World())


def test_a_label_from_far_ahead() -> None:
    rule_cases.check_far_label(World())


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_stopped_rank_finds_its_results(newest_first: bool) -> None:
    rule_cases.check_stopped(World(), newest_first)
