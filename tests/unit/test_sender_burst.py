"""Whose turn it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.errors import ConfigError
from tailbound.transport.batch import MAX_BYTES, burst_packets, stagger


@pytest.mark.parametrize(("stride", "packets"), [(1472, 44), (80, 64), (8960, 7), (1023, 64), (1024, 63), (65507, 1)])
def test_packets_of_a_burst(stride: int, packets: int) -> None:
    assert burst_packets(stride) == packets


@pytest.mark.parametrize("stride", [0, -1, MAX_BYTES + 1])
def test_a_stride_that_does_not_fit(stride: int) -> None:
    with pytest.raises(ConfigError, match="give 1"):
        burst_packets(stride)


def test_stagger() -> None:
    assert list(stagger(1, 4)) == [2, 3, 0]
    assert list(stagger(0, 1)) == []


@given(st.integers(1, 40))
def test_nobody_is_hit_by_two_at_once(ranks: int) -> None:
    orders = [list(stagger(rank, ranks)) for rank in range(ranks)]
    for turn in zip(*orders, strict=True):
        assert sorted(turn) == list(range(ranks))
