"""The first steps of a job with codes of 16 bits, and how it goes over to 8 (codec-12)."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sim.team import Result, SimTeam, sim_team
from sim.test_balance import changes, cold_ops, inputs_of
from support import exact_mean, nmse, patient
from tailbound.codec.scale import regrouped
from tailbound.wire.schema import EXPONENT_NONE
from tailbound_lab.simulate.fabric import MS, Terms

FINE, RANKS = 8, 4
SETTINGS = {"width": 1408, "ring_mib": 4.0, "share_rows": False, "balance": True, "fine_steps": FINE}


def step(job: SimTeam, seed: int, ranks: list[int] | None = None) -> tuple[list[Result], NDArray[np.float64]]:
    inputs = inputs_of(seed, 1e-2)
    results = job.allreduce(inputs, ranks)
    job.go(20 * MS)
    return results, exact_mean(inputs)


def test_scales_and_exponents_are_carried_over_though_rows_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """No op but the first is cold, nothing is refused, and whole averages have the same bits."""
    cold = cold_ops(monkeypatch)
    with sim_team(RANKS, patient(**SETTINGS), terms=Terms(loss=0.02, burst=5)) as job:
        for seed in range(3 * FINE):
            results, exact = step(job, seed)
            whole = [out for out, outcome in results if not outcome.missed]
            for out in whole:
                np.testing.assert_array_equal(out.view(np.uint32), whole[0].view(np.uint32))
            if all(outcome.delivered == outcome.expected for _, outcome in results):
                assert nmse(whole[0], exact) < (1e-7 if seed < FINE else 1e-3)
        assert sorted(cold) == list(range(RANKS))
        assert min(changes(job)) >= 1
        assert not any("SCALE_MISMATCH" in member.stats()["drops"] for member in job.communicators)
        assert {key[3] >> 2 & 31 for key in job[0].job.exponents} == {8, 16}


def test_a_rank_that_jumps_over_the_last_fine_step_has_the_codes_of_the_others() -> None:
    """Rule: clock-20."""
    with sim_team(RANKS, patient(**SETTINGS, suspect_after=1) | {"ring_mib": 0.5}) as job:
        for seed in range(FINE - 2):
            step(job, seed)
        late = RANKS - 1
        while not job[late].lost:
            step(job, seed := seed + 1, [0, 1, 2])
        assert job[0].step > FINE + 1
        assert job[late].jump() > 2
        for more in range(4):
            results, exact = step(job, seed + 1 + more)
            assert all(outcome.error is None for _, outcome in results)
        assert all(outcome.delivered == outcome.expected for _, outcome in results)
        assert nmse(results[late][0], exact) < 1e-3


def test_ops_have_the_same_entries_in_all_steps_and_the_finest_fit_the_ring() -> None:
    settings = SETTINGS | {"width": 64, "ring_mib": 0.125, "fine_steps": 3}
    with sim_team(2, patient(**settings)) as job:
        ops: list[list[tuple[int, int]]] = []
        for seed in range(7):
            inputs = inputs_of(seed, 1e-2)[:2]
            assert all(outcome.error is None for _, outcome in job.allreduce(inputs))
            ops.append([(layout.shape.numel, layout.shape.bits) for layout in job[0].job.sequence.layouts])
        assert len(ops[2]) == len(ops[6]) == job[0].ops(len(inputs[0])) > 1
        assert ops[2] == [(numel, 16) for numel, _ in ops[6]]
        assert max(2 * layout.shape.rows for layout in job[0].job.sequence.layouts) <= min(job[0].job.least_rings)


def test_groups_take_over_the_largest_of_those_they_share_entries_with() -> None:
    found = regrouped(np.array([3, 9, EXPONENT_NONE, -4, 5], np.int16), (40, 60), 190)
    assert found.tolist() == [9, 9, 5, 5]
    same = np.array([3, EXPONENT_NONE, 1], np.int16)
    assert regrouped(same, (40, 40), 100).tolist() == same.tolist()
    assert regrouped(np.array([1, 2], np.int16), (80, 40), 130).tolist() == [1, 1, 2, 2]
