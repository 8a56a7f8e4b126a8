"""Losses on a link of 1 Gbit/s, in virtual time: lost rows are requested while their flows run (clock-23)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tailbound.transport.deadline import WARM_UP_OPS
from tailbound_lab.simulate.fabric import MS
from tailbound_lab.simulate.layouts import arrange
from tailbound_lab.simulate.ports import Switching
from tailbound_lab.simulate.steps import Team

#: An op of 4 MiB takes 14 ms; with requests after the mark alone losses made that 26 ms.
ENTRIES, RANKS = 1 << 20, 4


def test_one_percent_of_losses_costs_little_time() -> None:
    switching = Switching(rate=10**9, buffer=3 << 20)
    team = Team(arrange("flat", RANKS, ENTRIES), switching, 1)
    try:
        calm = [team.step() for _ in range(WARM_UP_OPS)]
        team.network.switching = replace(switching, loss=0.01)
        lossy = [team.step() for _ in range(12)]
    finally:
        team.close()
    usual, now = (np.median([took for step in steps[-8:] for took in step.took]) / MS for steps in (calm, lossy))
    assert sum(step.dropped["loss"] for step in lossy) > 100
    assert sum(step.delivered for step in lossy) == sum(step.expected for step in lossy)
    assert now <= 1.5 * usual, f"{now:.1f} ms with losses, {usual:.1f} without"
