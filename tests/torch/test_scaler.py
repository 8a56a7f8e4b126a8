"""The gradient scaler in real processes: ranks lower their scales, and agree on what is skipped (clock-25)."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from processes import Run

pytestmark = pytest.mark.needs("torch")

SCALE = 2.0**10
#: Who overflows, step by step.
ONE_RANK: list[Collection[int]] = [(), (1,), (), (), (2,), (), (), ()]


def test_a_rank_that_overflows_lowers_the_scale_of_all(run: Run) -> None:
    """Else loops that clip scaled gradients part replicas. Its step is applied everywhere, with the mean of the others.

    5 % of all packets get lost.
    """
    results = run("scaler_jobs.overflowing", 3, ONE_RANK)
    for rank, result in enumerate(results):
        assert [moved for _, _, moved, _ in result["steps"]] == [True] * len(ONE_RANK)
        lowered = [step for step, (before, after, _, _) in enumerate(result["steps"]) if after == before / 2]
        assert lowered == [step for step, ranks in enumerate(ONE_RANK) if ranks]
        assert result["steps"][-1][1] == SCALE / 2 ** len(lowered)
        assert bool(result["stats"]["counters"].get("abstained")) == (rank in (1, 2))


def test_the_scaler_of_torch_backs_off(run: Run) -> None:
    """Also in the first step, in which it may not have been seen yet: nobody steps by zeros."""

    ill: list[Collection[int]] = [(0, 1, 2), (), (1,), (), (0, 1, 2), (), ()]
    results = run("scaler_jobs.stock", 3, ill)
    for steps in results:
        assert [moved for _, _, moved, _ in steps] == [len(ranks) < 3 for ranks in ill]
        assert [before / after for before, after, _, _ in steps] == [2 if ranks else 1 for ranks in ill]
    for step in range(len(ill)):
        assert len({steps[step][3] for steps in results}) == 1


def test_scalers_that_cannot_be_taken_in_are_refused_before_they_step(run: Run) -> None:
    for kind, other, one_rank in run("scaler_jobs.strange", 2):
        assert "Mine scales the loss" in kind
        assert "one for each registered model" in kind
        assert "GradScaler" in other
        assert "rank 0" in one_rank
        assert "rank 1" in one_rank


def test_scales_may_differ_and_the_average_does_not(run: Run) -> None:
    run("scaler_jobs.unlike", 2)


def test_a_checkpoint_keeps_the_scale(run: Run) -> None:
    assert run("scaler_jobs.saved", 2) == [(SCALE / 2, SCALE / 2, 2)] * 2
