"""Whole all-reduces whose rows a switch averages, against the reference switch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support import PATIENCE, exact_mean, gradients, nmse, patient
from switched_team import switched_team
from tailbound.wire.schema import Verdict

NUMEL = 2 * 64 * 128  # two groups of 64 rows of 128 codes
FORMS = ["mean", "sums"]


def identical(results: list[Any]) -> bool:
    first = results[0][0].view(np.uint32)
    return all(np.array_equal(first, out.view(np.uint32)) for out, _ in results)


def whole(results: list[Any]) -> bool:
    return all(o.delivered == o.expected and o.error is None and not o.missing and not o.late for _, o in results)


@pytest.mark.parametrize("form", FORMS)
def test_the_mean_is_within_the_quantisers_bound(form: str) -> None:
    ranks, errors = 3, []
    with switched_team(ranks, patient(), form=form) as (job, switch):
        for op in range(6):
            inputs = gradients("U", ranks, NUMEL, seed=op)
            results = job.allreduce(inputs)
            assert whole(results)
            assert identical(results)
            errors.append(nmse(results[0][0], exact_mean(inputs)))
        rules = switch.rules
        assert rules is not None
        assert set(rules.counts) <= {Verdict.STORED, Verdict.ADDED, Verdict.REFLECTED}
        for member in job.communicators:
            stats = member.stats()
            assert stats["delivered"] == 1.0
            assert stats["ledger"]["results"][str(ranks)]["taken"] == stats["verdicts"]["RESULT_TAKEN"]
    # mean codes share the contributions' scale, so that theirs is the rounding of every rank and of the mean
    assert np.mean(errors) <= (1.5e-3 if form == "sums" else 3e-3)


@pytest.mark.parametrize("form", FORMS)
def test_several_buckets_in_flight_and_rings_that_wrap(form: str) -> None:
    """Forty ops of two sizes through 512 slots, as many at a time as there is room for."""
    ranks, sizes = 3, [3000, 9000]
    with switched_team(ranks, patient(), form=form, rows=512) as (job, _):
        for _ in range(2):
            inputs = [gradients("U", ranks, sizes[op % 2], seed=op) for op in range(20)]

            def launch(member: Any, inputs: list[Any] = inputs) -> list[Any]:
                own = [x[member.config.rank] for x in inputs]
                outs = [np.full_like(x, np.nan) for x in own]
                futures = [member.allreduce(x, out) for x, out in zip(own, outs, strict=True)]
                return [(out, future.result(PATIENCE)) for out, future in zip(outs, futures, strict=True)]

            by_rank = job.each(launch)
            for op in range(20):
                results = [by_rank[rank][op] for rank in range(ranks)]
                assert whole(results)
                assert identical(results)
                assert nmse(results[0][0], exact_mean(inputs[op])) <= 6e-3


def test_a_scale_that_outgrows_its_headroom_is_clipped_and_counted() -> None:
    with switched_team(2, patient()) as (job, _):
        inputs = gradients("U", 2, NUMEL, seed=1)
        job.allreduce(inputs)
        results = job.allreduce([10 * x for x in inputs])
        assert all(outcome.clipped > 0 for _, outcome in results)
        results = job.allreduce([10 * x for x in inputs])
        assert all(outcome.clipped == 0 for _, outcome in results)
        assert nmse(results[0][0], exact_mean([10 * x for x in inputs])) <= 3e-3
