"""Rules that take several packets to see, in the kernel, for programs from BCC and from clang."""

from __future__ import annotations

import pytest

import rule_cases


def test_a_wrong_exponent_does_not_stay(make) -> None:
    rule_cases.check_exponent(make())


def test_a_complete_row_that_begins_again(make) -> None:
    rule_cases.check_complete_again(make())


def test_a_row_counts_once(make) -> None:
    rule_cases.check_counted_once(make())


def test_a_label_from_far_ahead(make) -> None:
    rule_cases.check_far_label(make())


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_stopped_rank_finds_its_results(make, newest_first: bool) -> None:
    rule_cases.check_stopped(make(), newest_first)
