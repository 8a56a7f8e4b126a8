"""Tailbound in turn with itself, while nothing slows its senders down."""

from __future__ import annotations

from tailbound.bench.worker import _Unpaced
from tailbound.transport.pace import Pacer

SECOND = 1_000_000_000


def test_nothing_slows_it_down_and_its_other_half_hears_of_all_that_changes() -> None:
    paced = Pacer([1, 2], speed=1.25e7, most=1.25e7)
    unpaced = _Unpaced(paced)
    unpaced.grant(1, 0.5)
    unpaced.follow(1.25e6)
    unpaced.among(1)
    for _ in range(3):
        unpaced.observe(2, 20_000_000, 100_000, 1.0, SECOND)
    assert unpaced.limited == set()
    assert unpaced.bursts(32, 1472, 1, SECOND) == 32
    assert unpaced.largest(1472) == 44
    assert paced.limited == {1}
    assert paced.rate(1) == 1.25e6 / 2
    assert paced.paths[1].peers == 1
