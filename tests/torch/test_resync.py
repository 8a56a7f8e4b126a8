"""Replicas that came apart, ranks that were stopped, late gradients: real processes over udp on loopback.

What a rank takes from whom is tested among threads (``unit/test_resync``), whole iterations of passes without a
transport (``unit/test_iterations``), and loops that skip no batches in ``torch/test_loops``.
"""

from __future__ import annotations

import pytest

from processes import Run

pytestmark = pytest.mark.needs("torch")


def test_a_stopped_rank_applies_what_the_others_have_finished(run_stopped: Run) -> None:
    """It computes none of the steps it was away for, and comes out with the same bits (clock-20)."""
    back = run_stopped("resync_jobs.stopped", 3, 2, 8.0, 10, 60, 0, 0.0)[2]
    applied = back["stats"]["counters"]["steps_applied"]
    assert applied >= 9
    assert back["computed"] + applied == 60
    assert back["jumped"] == 0


@pytest.mark.parametrize(
    ("ring_mib", "missed", "steps", "mtu", "loss"),
    [(0.5, 30, 90, 0, 0.0), pytest.param(0.004, 6, 40, 156, 0.01, marks=pytest.mark.thorough)],
    ids=["few_steps_a_ring", "many_rings_a_step"],
)
def test_a_lost_rank_jumps_and_takes_the_state_of_another(
    run_stopped: Run, ring_mib: float, missed: int, steps: int, mtu: int, loss: float
) -> None:
    """What it missed is gone; a step may go through the ring twelve times, and packets get lost.

    Rules: clock-20, clock-21.
    States: lost to in step.
    """
    back = run_stopped("resync_jobs.stopped", 3, 2, ring_mib, missed, steps, mtu, loss)[2]
    assert back["held"] < 0.1 or not mtu
    assert back["jumped"] >= min(missed - 1, 25)
    assert back["stats"]["replica"]["counters"]["whole_taken"] >= 1
    applied = back["stats"]["counters"].get("steps_applied", 0)
    assert back["computed"] + back["jumped"] + applied == steps  # at the same place in the data as the others
    assert back["stats"]["delivered"] > 0.5
