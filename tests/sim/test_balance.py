"""Exponents of tensors change while rows are lost, and without a rank that knows no scales (codec-18)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from sim.team import Result, SimTeam, sim_team
from support import exact_mean, gradients, nmse, patient
from tailbound.collective import execute
from tailbound.collective.actions import Measure
from tailbound.collective.job import Job
from tailbound.collective.op import Op
from tailbound_lab.simulate.fabric import MS, Terms

#: Three blocks of a bucket that is not named.
NUMEL, RANKS = 40_001, 4
SETTINGS = {"width": 1408, "ring_mib": 4.0, "share_rows": False, "balance": True}


def inputs_of(seed: int, small: float) -> list[NDArray[np.float32]]:
    """The last block is ``small``."""
    inputs = gradients("U", RANKS, NUMEL, seed=seed)
    for x in inputs:
        x[2 * NUMEL // 3 :] *= np.float32(small)
    return inputs


def step(job: SimTeam, seed: int, small: float) -> list[Result]:
    results = job.allreduce(inputs_of(seed, small))
    job.go(20 * MS)
    return results


def changes(job: SimTeam) -> list[int]:
    return [member.job.counters["exponents_settled"] for member in job.communicators]


def cold_ops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks that have a cold op, one more time for each."""
    found: list[int] = []
    of = execute._EXECUTE[Measure]

    def measure(job: Job, op: Op, action: Measure) -> None:
        found.append(job.rank)
        of(job, op, action)

    monkeypatch.setitem(execute._EXECUTE, Measure, measure)
    return found


def test_scales_stay_the_same_on_all_ranks_though_rows_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """No op is cold after the first one, nothing is refused, and whole averages have the same bits."""
    cold = cold_ops(monkeypatch)
    terms = Terms(loss=0.02, burst=5)
    with sim_team(RANKS, patient(**SETTINGS), terms=terms) as job:
        for seed in range(24):
            results = step(job, seed, 1e-2 if seed // 8 % 2 else 1e-1)
            whole = [out for out, outcome in results if not outcome.missed]
            for out in whole:
                np.testing.assert_array_equal(out.view(np.uint32), whole[0].view(np.uint32))
        assert sorted(cold) == list(range(RANKS))
        assert min(changes(job)) >= 2
        assert len(set(changes(job))) == 1
        assert not any("SCALE_MISMATCH" in member.stats()["drops"] for member in job.communicators)


def test_exponents_that_were_given_up_are_not_settled_any_more() -> None:
    """Who leads has forgotten them: the last acknowledgement of the proposal that named them ended its thread."""
    with sim_team(RANKS, patient(**SETTINGS)) as job:
        maps, here, seed = job[0]._engine.maps, job[0].job, 0
        step(job, seed, 1e-1)
        while maps.agreement.busy(maps._step, here.now()) or not maps.agreement.quiet:
            step(job, seed := seed + 1, 1e-1)
        present = maps.agreement.agreed[-1].content
        assert maps.balancing.leads
        assert maps.agreement.propose(replace(present, balance=present.balance ^ 1), maps._step, here.now())
        maps.balancing.wish, maps.balancing._better = None, {}
        maps._wish(maps._step, {}, here.now())
        assert maps.agreement.quiet


def test_a_rank_that_knows_no_scales_is_in_again_after_an_op() -> None:
    """As one that has jumped over a change: the others have moved theirs, and it learns them from their results."""
    with sim_team(RANKS, patient(**SETTINGS)) as job:
        seed = 0
        while not min(changes(job)):
            step(job, seed := seed + 1, 1e-2)
        here = job[2].job
        while job[0].job.sequence.map.balance == 0:
            step(job, seed := seed + 1, 1e-2)
        here.exponents.clear()
        outcomes = [outcome for _, outcome in step(job, seed + 1, 1e-2)]
        assert all(outcome.error is None for outcome in outcomes)
        for more in range(2, 6):
            results = step(job, seed + more, 1e-2)
        for out, outcome in results:
            assert outcome.delivered == outcome.expected
            np.testing.assert_array_equal(out.view(np.uint32), results[0][0].view(np.uint32))
        assert nmse(results[0][0], exact_mean(inputs_of(seed + 5, 1e-2))) < 2e-3


def test_exponents_wait_for_a_rank_that_cannot_get_their_table() -> None:
    """It never averages by other exponents than the rest: all keep those they have until it has acknowledged."""
    with sim_team(RANKS, patient(**SETTINGS)) as job:
        maps = job[2]._engine.maps
        fetch, maps.fetch = maps.fetch, lambda *_: None
        for seed in range(12):
            results = step(job, seed, 1e-2)
            for out, outcome in results:
                assert outcome.delivered == outcome.expected
                np.testing.assert_array_equal(out.view(np.uint32), results[0][0].view(np.uint32))
        assert not any(changes(job))
        maps.fetch = fetch
        settled: set[int] = {0}
        for seed in range(12, 100):
            step(job, seed, 1e-2)
            settled = {member.job.sequence.map.balance for member in job.communicators}
            if 0 not in settled:
                break
        assert len(settled - {0}) == 1
