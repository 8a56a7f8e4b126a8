"""Rules that take several packets to see, in the kernel, for programs from BCC and from clang."""

from __future__ import annotations

import pytest

import rule_cases


def test_a_label_from_far_ahead(make) -> None:
    rule_cases.check_far_label(make())


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_stopped_rank_finds_its_results(make, newest_first: bool) -> None:
    rule_cases.check_stopped(make(), newest_first)
