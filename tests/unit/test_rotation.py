"""Auto mode of the Hadamard rotation: on with loss, off after calm, no flapping, one rank in need is enough.

Rule: codec-12.
"""

from __future__ import annotations

import random

import pytest

from tailbound.transport.safeguard import CALM_OPS, OFF_BELOW, ON_ABOVE, Rotation


def run(policies: list[Rotation], losses: list[float], ops: int, rotating: bool) -> tuple[bool, int]:
    """Ranks in step: flags of one op are seen by all, and the first one's wish is what is done. State and switches."""
    switches = 0
    for _ in range(ops):
        flagged = [p.lossy for p in policies]
        for i, policy in enumerate(policies):
            policy.observe(10_000, int(10_000 * (1 - losses[i])), rotating=rotating, others=any(flagged))
        switches += policies[0].wanted != rotating
        rotating = policies[0].wanted
    return rotating, switches


@pytest.mark.parametrize("mode", [True, False])
def test_a_fixed_mode_stays(mode: bool) -> None:
    policy = Rotation(mode)
    assert run([policy], [0.3 if not mode else 0.0], 3 * CALM_OPS, mode) == (mode, 0)
    assert not policy.lossy


def test_auto_starts_on_and_goes_when_it_is_calm() -> None:
    policy = Rotation("auto")
    assert run([policy], [0.0], CALM_OPS - 1, True) == (True, 0)
    assert run([policy], [0.0], 2, True) == (False, 1)


def test_it_comes_back_with_loss_and_goes_again() -> None:
    policy = Rotation("auto")
    assert run([policy], [0.0], CALM_OPS, True)[0] is False
    rotating, switches = run([policy], [0.02], 100, False)
    assert (rotating, switches) == (True, 1)
    rotating, switches = run([policy], [0.0], 4 * CALM_OPS + 500, True)
    assert (rotating, switches) == (False, 1)


def test_one_ranks_loss_keeps_it_on_for_all() -> None:
    policies = [Rotation("auto") for _ in range(4)]
    assert run(policies, [0.0, 0.0, 0.02, 0.0], 3 * CALM_OPS, True) == (True, 0)
    assert run(policies, [0.0] * 4, 10 * CALM_OPS, True) == (False, 1)
    assert run(policies, [0.0, 0.0, 0.0, 0.02], 100, False) == (True, 1)


def test_loss_around_a_threshold_does_not_make_it_flap() -> None:
    draw = random.Random(1)
    policy, rotating, switches = Rotation("auto"), True, 0
    for _ in range(5000):
        loss = draw.choice((0.0, 2 * ON_ABOVE, OFF_BELOW))
        policy.observe(100_000, int(100_000 * (1 - loss)), rotating=rotating)
        switches += policy.wanted != rotating
        rotating = policy.wanted
    assert (rotating, switches) == (True, 0)


def test_one_bad_op_among_many_good_ones_brings_it_on() -> None:
    policy = Rotation("auto")
    run([policy], [0.0], CALM_OPS, True)
    policy.observe(100, 10, rotating=False)
    assert policy.wanted
