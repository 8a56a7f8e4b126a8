"""How many packets leave by one call."""

from __future__ import annotations

import pytest

from tailbound.errors import ConfigError
from tailbound.transport.batch import MAX_BYTES, burst_packets


@pytest.mark.parametrize(("stride", "packets"), [(1472, 44), (80, 64), (8960, 7), (1023, 64), (1024, 63), (65507, 1)])
def test_packets_of_a_burst(stride: int, packets: int) -> None:
    assert burst_packets(stride) == packets


@pytest.mark.parametrize("stride", [0, -1, MAX_BYTES + 1])
def test_a_stride_that_does_not_fit(stride: int) -> None:
    with pytest.raises(ConfigError, match="give 1"):
        burst_packets(stride)
