"""Codes of 4 bits in the sums of the udp datapath: the same cases as the kernel's."""

from __future__ import annotations

import pytest

import nibble_cases
from udp_world import World


@pytest.mark.parametrize("count", nibble_cases.COUNTS)
def test_sums_of_half_bytes(count: int) -> None:
    nibble_cases.check_sums(World(), count)


def test_more_than_seventeen_ranks() -> None:
    nibble_cases.check_more(World(ranks=32))
