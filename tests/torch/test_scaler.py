"""The gradient scaler in real processes: ranks agree on the scale, and on which step is skipped (clock-25)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from processes import Run

pytestmark = pytest.mark.needs("torch")

SCALE = 2.0**10
#: Who overflows, step by step.
ONE_RANK: list[Collection[int]] = [(), (1,), (), (), (2,), (), (), ()]


def _settled(results: list[dict[str, Any]], ill: list[Collection[int]]) -> None:
    """Equal scales on all ranks, one step after an overflow at the latest."""
    for step, ranks in enumerate(ill):
        scales = {result["steps"][step][1] for result in results}
        assert len(scales) == 1 or ranks, (step, scales)


def test_a_rank_that_overflows_lowers_the_scale_of_all(run: Run) -> None:
    """Its step is applied everywhere, with the mean of the others. 5 % of all packets get lost."""
    results = run("scaler_jobs.overflowing", 3, ONE_RANK, 0.05, 100)
    _settled(results, ONE_RANK)
    for rank, result in enumerate(results):
        assert [moved for _, _, moved, _ in result["steps"]] == [True] * len(ONE_RANK)
        assert result["steps"][-1][1] == SCALE / 4
        assert bool(result["stats"]["counters"].get("abstained")) == (rank in (1, 2))
    for rank in (1, 2):  # who overflows backs off at once
        step = next(i for i, ranks in enumerate(ONE_RANK) if rank in ranks)
        before, after, _, _ = results[rank]["steps"][step]
        assert after == before / 2


def test_the_scale_grows_on_all_ranks_at_the_same_step(run: Run) -> None:
    ill: list[Collection[int]] = [(), (), (), (0,), (), (), (), (), ()]
    results = run("scaler_jobs.overflowing", 3, ill, 0.0, 2)
    _settled(results, ill)
    # two clean steps, growth, one more, backed off, growth after steps 5 and 7
    wanted = [SCALE, 2 * SCALE, 2 * SCALE, SCALE, SCALE, 2 * SCALE, 2 * SCALE, 4 * SCALE, 4 * SCALE]
    assert [after for _, after, _, _ in results[0]["steps"]] == wanted
    assert [after for _, after, _, _ in results[1]["steps"]][4:] == wanted[4:]


def test_the_scaler_of_torch_backs_off_on_all_ranks_alike(run: Run) -> None:
    """Also in the first step, in which it may not have been seen yet: nobody steps by zeros."""

    ill: list[Collection[int]] = [(0, 1, 2), (), (1,), (), (0, 1, 2), (), ()]
    results = run("scaler_jobs.stock", 3, ill)
    for steps in results:
        assert [moved for _, _, moved, _ in steps] == [len(ranks) < 3 for ranks in ill]
        assert steps[0][1] == SCALE / 2
        assert steps[-1][1] == SCALE / 8
    for step, ranks in enumerate(ill):
        assert len({steps[step][3] for steps in results}) == 1
        assert len({steps[step][1] for steps in results}) == 1 or ranks
    assert results[1][2][1] == SCALE / 4  # who overflows backs off at once


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
