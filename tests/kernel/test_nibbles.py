"""Codes of 4 bits in the kernel's sums, for programs from BCC and from clang."""

from __future__ import annotations

import pytest

import nibble_cases
from tailbound.wire.schema import Flag


@pytest.mark.parametrize("count", nibble_cases.COUNTS)
def test_sums_of_half_bytes(make, count: int) -> None:
    nibble_cases.check_sums(make(), count)


def test_seventeen_ranks_fill_a_lane(make) -> None:
    nibble_cases.check_most(make(ranks=32))


@pytest.mark.parametrize("count", nibble_cases.HALF_COUNTS)
def test_sums_of_half_bytes_in_wide_lanes(make, count: int) -> None:
    nibble_cases.check_sums(make(), count, Flag.HALVES)


def test_more_than_seventeen_ranks(make) -> None:
    nibble_cases.check_more(make(ranks=32))
