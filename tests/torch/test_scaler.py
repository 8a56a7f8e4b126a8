"""The gradient scaler in real processes: ranks agree on the scale, and on which step is skipped (clock-25)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.needs("torch")

SCALE = 2.0**10
#: Who overflows, step by step.
ONE_RANK: list[Collection[int]] = [(), (1,), (), (), (2,), (), (), ()]
ALL_RANKS: list[Collection[int]] = [(), (), (0, 1, 2), (), (0, 1, 2), (0, 1, 2), (), (), ()]


def _run(folder: Path, ill: list[Collection[int]], loss: float, interval: int = 100) -> list[dict[str, Any]]:
    import scaler_jobs
    from processes import Job

    with Job(scaler_jobs.overflowing, 3, folder, ill, loss, interval) as job:
        results: list[dict[str, Any]] = job.results()
    for result in results:
        assert result["stats"]["counters"].get("seal_deadline_hits", 0) == 0
    return results


def _settled(results: list[dict[str, Any]], ill: list[Collection[int]]) -> None:
    """Equal scales on all ranks, one step after an overflow at the latest."""
    for step, ranks in enumerate(ill):
        scales = {result["steps"][step][1] for result in results}
        assert len(scales) == 1 or ranks, (step, scales)


@pytest.mark.parametrize("loss", [pytest.param(0.0, marks=pytest.mark.thorough), 0.05])
def test_a_rank_that_overflows_lowers_the_scale_of_all(tmp_path: Path, loss: float) -> None:
    """Its step is applied everywhere, with the mean of the others."""
    results = _run(tmp_path, ONE_RANK, loss)
    _settled(results, ONE_RANK)
    for rank, result in enumerate(results):
        assert [moved for _, _, moved, _ in result["steps"]] == [True] * len(ONE_RANK)
        assert result["steps"][-1][1] == SCALE / 4
        assert bool(result["stats"]["counters"].get("abstained")) == (rank in (1, 2))
    for rank in (1, 2):  # who overflows backs off at once
        step = next(i for i, ranks in enumerate(ONE_RANK) if rank in ranks)
        before, after, _, _ = results[rank]["steps"][step]
        assert after == before / 2


def test_a_step_in_which_all_overflow_is_skipped_by_all(tmp_path: Path) -> None:
    """AdamW would move the parameters by a gradient of zeros."""
    results = _run(tmp_path, ALL_RANKS, 0.0)
    _settled(results, ALL_RANKS)
    for result in results:
        assert [moved for _, _, moved, _ in result["steps"]] == [not ranks for ranks in ALL_RANKS]
        assert result["steps"][-1][1] == SCALE / 8
        assert result["stats"]["replica"]["sound"]  # nobody has missed anything
        assert result["stats"]["suspects"] == []
        assert result["stats"]["delivered"] == 1.0
    for step in range(len(ALL_RANKS)):
        assert len({result["steps"][step][3] for result in results}) == 1


def test_the_scale_grows_on_all_ranks_at_the_same_step(tmp_path: Path) -> None:
    ill: list[Collection[int]] = [(), (), (), (0,), (), (), (), (), ()]
    results = _run(tmp_path, ill, 0.0, interval=2)
    _settled(results, ill)
    # two clean steps, growth, one more, backed off, growth after steps 5 and 7
    wanted = [SCALE, 2 * SCALE, 2 * SCALE, SCALE, SCALE, 2 * SCALE, 2 * SCALE, 4 * SCALE, 4 * SCALE]
    assert [after for _, after, _, _ in results[0]["steps"]] == wanted
    assert [after for _, after, _, _ in results[1]["steps"]][4:] == wanted[4:]


@pytest.mark.parametrize("told", [True, False])
def test_the_scaler_of_torch_backs_off_on_all_ranks_alike(tmp_path: Path, told: bool) -> None:
    """Also in the first step, in which it may not have been seen yet: nobody steps by zeros."""
    import scaler_jobs
    from processes import Job

    ill: list[Collection[int]] = [(0, 1, 2), (), (1,), (), (0, 1, 2), (), ()]
    with Job(scaler_jobs.stock, 3, tmp_path, ill, told) as job:
        results = job.results()
    for steps in results:
        assert [moved for _, _, moved, _ in steps] == [len(ranks) < 3 for ranks in ill]
        assert steps[0][1] == SCALE / 2
        assert steps[-1][1] == SCALE / 8
    for step, ranks in enumerate(ill):
        assert len({steps[step][3] for steps in results}) == 1
        assert len({steps[step][1] for steps in results}) == 1 or ranks
    assert results[1][2][1] == SCALE / 4  # who overflows backs off at once


def test_scalers_that_cannot_be_taken_in_are_refused_before_they_step(tmp_path: Path) -> None:
    import scaler_jobs
    from processes import Job

    with Job(scaler_jobs.strange, 2, tmp_path) as job:
        for kind, other, one_rank in job.results():
            assert "Mine scales the loss" in kind
            assert "one for each registered model" in kind
            assert "GradScaler" in other
            assert "rank 0" in one_rank
            assert "rank 1" in one_rank


def test_scales_may_differ_and_the_average_does_not(tmp_path: Path) -> None:
    import scaler_jobs
    from processes import Job

    with Job(scaler_jobs.unlike, 2, tmp_path) as job:
        job.results()


def test_a_checkpoint_keeps_the_scale(tmp_path: Path) -> None:
    import scaler_jobs
    from processes import Job

    with Job(scaler_jobs.saved, 2, tmp_path) as job:
        assert job.results() == [(SCALE / 2, SCALE / 2, 2)] * 2


def test_a_world_of_one_is_torchs(tmp_path: Path) -> None:
    import scaler_jobs
    from processes import Job

    with Job(scaler_jobs.alone, 1, tmp_path) as job:
        (steps,) = job.results()
    assert [(after, moved) for _, after, moved, _ in steps] == [
        (SCALE, True), (SCALE / 2, False), (SCALE / 2, True), (SCALE, True)
    ]  # fmt: skip
