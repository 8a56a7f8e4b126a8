"""Ranks that train: buckets that follow each other without a pause take what the links need, and not twice that."""

from __future__ import annotations

import pytest

from tailbound_lab.simulate.fabric import MS
from tailbound_lab.simulate.ports import Switching
from tailbound_lab.simulate.run import as_in_the_lab
from tailbound_lab.simulate.training import train

MBIT = 10**6


@pytest.mark.parametrize(
    ("ranks", "steps", "spread"),
    [(4, 4, 2 * MS), (4, 5, 60 * MS), pytest.param(8, 6, 2 * MS, marks=pytest.mark.thorough)],
    ids=["four ranks", "four that drift apart", "eight ranks"],
)
def test_what_waits_in_own_queues_slows_nobody_down(ranks: int, steps: int, spread: int) -> None:
    """Nobody says how fast the links are, so sockets fill up: 1 MiB there takes 34 ms, as do the echoes behind it."""
    found = train(ranks, 1_500_000, 4, steps, as_in_the_lab(Switching(rate=250 * MBIT)), spread=spread)
    assert found.dropped == {}
    assert found.missing[0] == 0
    assert found.step <= 1.12 * found.least
