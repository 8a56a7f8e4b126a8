"""Limits on loss: which action, and when; the strongest wins (clock-15)."""

from __future__ import annotations

from typing import Any

import pytest

from tailbound.errors import ConfigError
from tailbound.transport.safeguard import Action, Limits, Safeguard

NEVER: dict[str, Any] = dict.fromkeys(
    ("warn_op", "warn_smoothed", "skip_op", "skip_smoothed", "stop_op", "stop_smoothed")
)


@pytest.mark.parametrize(
    ("taken", "action"),
    [(100, Action.NONE), (90, Action.NONE), (89, Action.WARN), (50, Action.WARN), (49, Action.SKIP), (9, Action.STOP)],
)
def test_one_op_is_judged_by_its_loss(taken: int, action: Action) -> None:
    limits = Limits(**NEVER | {"warn_op": 0.1, "skip_op": 0.5, "stop_op": 0.9})
    assert Safeguard(limits, 4).judge(100, taken).action == action


def test_small_losses_that_stay_are_seen_smoothed() -> None:
    guard = Safeguard(Limits(**NEVER | {"warn_smoothed": 0.02, "skip_smoothed": 0.05}), 4)
    actions = [guard.judge(100, 94).action for _ in range(200)]
    assert actions[0] == Action.NONE
    assert actions == sorted(actions)
    assert {Action.WARN, Action.SKIP} <= set(actions)
    assert guard.smoothed == pytest.approx(0.06, rel=0.05)
    calm = [guard.judge(100, 100).action for _ in range(200)]
    assert calm[-1] == Action.NONE


@pytest.mark.parametrize("policy", ["none", "warn", "skip", "stop"])
def test_too_few_contributors(policy: str) -> None:
    guard = Safeguard(Limits(too_few=policy), 4)
    assert guard.judge(0, 0, 3).action == Action.NONE
    found = guard.judge(0, 0, 2)  # a majority of 4 is 3
    assert found.action == Action[policy.upper()]
    assert found.why == ("" if policy == "none" else "2 contributors, fewer than 3")
    assert guard.judge(0, 0).action == Action.NONE


def test_fewest_contributors_can_be_set() -> None:
    guard = Safeguard(Limits(min_contributors=1, too_few="stop"), 8)
    assert guard.judge(0, 0, 1).action == Action.NONE
    assert guard.judge(0, 0, 0).action == Action.STOP


def test_by_default_ordinary_loss_is_nothing_and_stopping_is_off() -> None:
    guard = Safeguard(Limits(), 4)
    assert all(guard.judge(1000, 990).action == Action.NONE for _ in range(500))
    assert max(guard.judge(1000, 0).action for _ in range(500)) == Action.SKIP


@pytest.mark.parametrize(
    "wrong", [{"warn_op": 1.5}, {"skip_smoothed": -0.1}, {"too_few": "panic"}, {"min_contributors": -1}]
)
def test_wrong_limits_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)
