"""Replicas that came apart, ranks that were stopped, late gradients: real processes over udp on loopback.

What a rank takes from whom is tested among threads (``unit/test_resync``), whole iterations of passes without a
transport (``unit/test_iterations``), and loops that skip no batches in ``torch/test_loops``.
"""

from __future__ import annotations

from typing import Any

import pytest

from processes import Run

pytestmark = pytest.mark.needs("torch")


@pytest.mark.parametrize(("share", "losers"), [(50.0, {0}), (0.0, {0, 1, 2})], ids=["one_loser", "on_demand"])
def test_replicas_forced_apart_come_together(run: Run, share: float, losers: set[int]) -> None:
    """Parameters and the optimizer's state are equal bit by bit after a few steps, or after one call on all ranks.

    Rules: clock-21, codec-13.
    """
    results = run("resync_jobs.drifting", 3, share, losers)
    digests, sound = zip(*(result["apart"] for result in results), strict=True)
    assert len(set(digests)) > 1
    assert not all(sound)
    assert all(result["synchronized"] for result in results)
    counts = [r["stats"]["replica"]["counters"] for r in results]
    took = [one.get("slices_taken", 0) + one.get("whole_taken", 0) for one in counts]
    assert any(took)
    assert not all(took) or len(losers) > 1  # who has missed nothing takes nothing
    assert len(losers) == 3 or not any(one.get("led", 0) for one in counts)
    digests, sound = zip(*results[0]["together"], strict=True)
    assert len(set(digests)) == 1
    assert all(sound)
    digests, sound = zip(*(result["after"] for result in results), strict=True)
    equal = {digest for digest, well in zip(digests, sound, strict=True) if well}
    assert len(equal) <= 1  # what has got lost anew has made its rank unsound


def _same_in_the_end(back: dict[str, Any]) -> None:
    assert len({digest for digest, sound, _ in back["digests"] if sound}) <= 1, back["digests"]
    assert len({digest for digest, _, synchronized in back["digests"] if synchronized}) == 1, back["digests"]


def test_a_stopped_rank_applies_what_the_others_have_finished(run_stopped: Run) -> None:
    """It computes none of the steps it was away for, and comes out with the same bits (clock-20)."""
    back = run_stopped("resync_jobs.stopped", 3, 2, 8.0, 10, 60, 0, 0.0)[2]
    applied = back["stats"]["counters"]["steps_applied"]
    assert applied >= 9
    assert len(back["computed"]) + applied == 60
    assert back["jumped"] == 0
    _same_in_the_end(back)


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
    assert len(back["computed"]) + back["jumped"] + applied == steps  # at the same place in the data as the others
    assert back["stats"]["delivered"] > 0.5
    _same_in_the_end(back)


def test_the_others_wait_for_a_rank_that_holds(run: Run) -> None:
    """Its Python cannot run meanwhile: the C library's ``usleep``, called with the GIL (clock-16)."""
    assert run("resync_jobs.holding", 3) == [[0, 0]] * 3
