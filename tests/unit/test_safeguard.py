"""Limits on loss: which action, and when; the strongest wins (clock-15)."""

from __future__ import annotations

from typing import Any

import pytest

from tailbound.errors import ConfigError
from tailbound.transport.safeguard import Action, Limits, Safeguard


@pytest.mark.parametrize(
    ("expected", "taken", "action"),
    [
        *((100, 100, Action.NONE), (100, 90, Action.NONE), (100, 89, Action.WARN), (100, 50, Action.WARN)),
        *((100, 49, Action.SKIP), (100, 9, Action.STOP), (8, 0, Action.STOP), (7, 0, Action.WARN), (1, 0, Action.WARN)),
    ],
)
def test_one_op_is_judged_by_its_loss(expected: int, taken: int, action: Action) -> None:
    assert Safeguard(Limits(skip=0.5, stop=0.9)).judge(expected, taken).action == action


def test_small_losses_that_stay_are_seen_smoothed() -> None:
    guard = Safeguard(Limits())
    actions = [guard.judge(100, 94).action for _ in range(200)]
    assert actions[0] == Action.NONE
    assert actions == sorted(actions)
    assert actions[-1] == Action.WARN
    assert guard.smoothed == pytest.approx(0.06, rel=0.05)
    calm = [guard.judge(100, 100).action for _ in range(200)]
    assert calm[-1] == Action.NONE


def test_by_default_ordinary_loss_is_nothing_and_stopping_is_off() -> None:
    guard = Safeguard(Limits())
    assert all(guard.judge(1000, 990).action == Action.NONE for _ in range(500))
    assert max(guard.judge(1000, 0).action for _ in range(500)) == Action.SKIP


@pytest.mark.parametrize("wrong", [{"skip": 1.5}, {"stop": -0.1}])
def test_wrong_limits_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)
