"""A job with a key in virtual time: losses, repairs and turns of keys at once. Rules: auth-1, auth-4, auth-5."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from first_time import dropped
from sim.team import sim_team
from support import Trouble, gradients, patient
from tailbound.simulate.fabric import MS
from tailbound.simulate.world import EPOCH_STEPS
from tailbound.wire.schema import PacketType, Verdict

WIDTH, RANKS, OPS = 64, 3, 5 * EPOCH_STEPS // 2
NUMEL = 8 * 64 * WIDTH
LOSING = patient(width=WIDTH, ring_mib=1.0, quiet=5 * MS)


def averages(**more: str) -> tuple[list[NDArray[np.float32]], int, int]:
    """What rank 0 gets in each op, packets that were lost, and those that were taken for forged."""
    found = []
    with sim_team(RANKS, LOSING | more) as job:
        troubles = job.trouble(lambda: Trouble(seed=4, loss=0.02))
        for op in range(OPS):
            results = job.allreduce(gradients("U", RANKS, NUMEL, seed=op))
            assert all(outcome.delivered == outcome.expected for _, outcome in results)
            found.append(results[0][0])
        forged = sum(int(each.job.records.verdicts()[:, Verdict.FORGED].sum()) for each in job.communicators)
        rings = [each.job.keys for each in job.communicators]
        assert all(ring is not None and ring.at >= 2 * EPOCH_STEPS for ring in rings) == bool(more)
        return found, sum(dropped(troubles, kind) for kind in PacketType), forged


def test_losses_are_repaired_across_epochs_to_the_same_bits() -> None:
    keyed, lost, forged = averages(authenticate="on")
    assert lost > 100
    assert forged == 0
    plain, _, _ = averages()
    assert all(np.array_equal(one, other) for one, other in zip(keyed, plain, strict=True))
