"""A job with a key in virtual time: losses, repairs and turns of keys at once. Rules: auth-1, auth-4, auth-5."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sim.team import dropped, sim_team
from support import Trouble, gradients, patient
from tailbound.wire.schema import UNKNOWN_SENDER, PacketType, Verdict
from tailbound_lab.simulate.fabric import MS
from tailbound_lab.simulate.world import EPOCH_STEPS

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


def test_keys_that_are_tried_too_often_give_way_on_all_ranks_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rank that sees the tries need not be the one that proposes maps; losses go on meanwhile. Rule: auth-8."""
    monkeypatch.setattr("tailbound_lab.simulate.world.EPOCH_STEPS", 4096)
    monkeypatch.setattr("tailbound.transport.forgeries.MOST", 20)
    seen_by = 2
    with sim_team(RANKS, LOSING | {"authenticate": "on", "first_step": 1000}) as job:
        job.trouble(lambda: Trouble(seed=4, loss=0.02))

        def average(op: int, whole: bool = True) -> list[int]:
            """Turns of all ranks' keys after an op; ``whole``: nothing was missing, and all had the same bits.

            While a map begins rows may be lost that a rank places by the one before (clock-22).
            """
            results = job.allreduce(gradients("U", RANKS, NUMEL, seed=op))
            if whole:
                assert all(outcome.delivered == outcome.expected for _, outcome in results)
                assert len({out.tobytes() for out, _ in results}) == 1
            job.go(5 * MS)
            return [each.job.keys.turns for each in job.communicators if each.job.keys]

        def forge() -> None:
            """As if so many packets with a wrong tag had come to one rank."""
            node = job[seen_by].node
            node.datapath.store.ledger["verdict"][UNKNOWN_SENDER, Verdict.FORGED] += 21
            node.datapath.taken += 21

        for op in range(10):
            assert average(op) == [0] * RANKS
        forge()
        turned = next(op for op in range(10, 210) if min(average(op, whole=False)))  # a lost word comes again
        assert average(turned + 1) == [1] * RANKS
        assert len({each.job.keys.epoch for each in job.communicators if each.job.keys}) == 1
        forge()
        for op in range(turned + 2, turned + 20):
            assert average(op) == [1] * RANKS, "another one is not asked for so soon"
        for each in job.communicators:
            assert each.job.counters["keys_turned_early"] == 1
        forged = [int(each.job.records.verdicts()[:, Verdict.FORGED].sum()) for each in job.communicators]
        assert forged == [42 * (rank == seen_by) for rank in range(RANKS)], "at the turn nothing was refused"


def test_losses_are_repaired_across_epochs_to_the_same_bits() -> None:
    keyed, lost, forged = averages(authenticate="on")
    assert lost > 100
    assert forged == 0
    plain, _, _ = averages()
    assert all(np.array_equal(one, other) for one, other in zip(keyed, plain, strict=True))
