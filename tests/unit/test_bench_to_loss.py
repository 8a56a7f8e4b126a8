"""Time to the loss that plain DDP reaches: smoothing, targets, who got there and who did not; models and text."""

from __future__ import annotations

from typing import Any

import pytest

from tailbound_lab.bench.to_loss import arrivals, first_below, lines, smoothed, target_of, window_of

#: Falls by one a step.
FALLING = [float(20 - step) for step in range(20)]


def training(name: str, losses: list[float] = FALLING, *, ms: float = 100.0, **changes: Any) -> dict[str, Any]:
    return {
        "scenario": "tails-gpt", "tail": 3.0, "seed": 1, "name": name, "complete": True, "steps": len(losses),
        "step_loss": losses, "step_ms": [ms] * len(losses), "step_end_ms": [ms * (at + 1) for at in range(len(losses))],
    } | changes  # fmt: skip


def test_the_first_time_that_the_smoothed_loss_is_below_the_target_counts() -> None:
    """A smoothed loss is the mean of the steps before; the target is the one after three quarters."""
    assert smoothed([4, 2, 3, 1], 2) == [3, 2.5, 2]
    assert (smoothed([4, 2], 1), smoothed([4], 2)) == ([4, 2], [])
    assert (window_of(120), window_of(20), window_of(3)) == (20, 3, 1)
    assert [first_below([4, 2, 3, 1], target, 2) for target in (2.5, 2.4, 1.9)] == [3, 4, None]
    assert (target_of(FALLING, 1), target_of(FALLING, 3)) == (FALLING[14], FALLING[13])
    assert first_below(FALLING, target_of(FALLING, 3), 3) == 15


def test_times_to_gloos_loss() -> None:
    behind = [loss + 2 for loss in FALLING]  # two steps more for the same loss
    never = [loss + 9 for loss in FALLING]
    rows = [
        training("gloo"), training("tailbound", behind, ms=50), training("powersgd", never, ms=40),
        training("gloo", tail=None), training("gloo", seed=2, complete=False), training("tailbound", seed=2),
    ]  # fmt: skip
    gloo, ours, powersgd = arrivals(rows)
    assert (gloo.seconds, gloo.over_plain, gloo.reached) == (pytest.approx(1.5), 1.0, True)
    assert (ours.seconds, ours.over_plain, ours.reached) == (pytest.approx(0.85), pytest.approx(0.85 / 1.5), True)
    # censored: it trained for 0.8 s and did not get there
    assert (powersgd.seconds, powersgd.reached) == (pytest.approx(0.8), False)
    assert [(row["who"], row["/gloo"], row["there"]) for row in lines([gloo, ours, powersgd])] == [
        ("gloo", "1.00", "1/1"), ("tailbound", "0.57", "1/1"), ("powersgd", "> 0.53", "0/1"),
    ]  # fmt: skip
