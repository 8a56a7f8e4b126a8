"""The hook beside DDP's options, torch's wrappers, sparse gradients and the compiler, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("torch")


def test_views_and_accumulation_in_every_type(tmp_path: Path) -> None:
    import hook_jobs
    from processes import Job

    with Job(hook_jobs.options, 2, tmp_path) as job:
        job.results()


def test_unused_and_frozen_parameters(tmp_path: Path) -> None:
    import hook_jobs
    from processes import Job

    with Job(hook_jobs.unused, 2, tmp_path) as job:
        job.results()


def test_the_compression_wrappers_of_torch(tmp_path: Path) -> None:
    import hook_jobs
    from processes import Job

    with Job(hook_jobs.wrapped, 2, tmp_path) as job:
        job.results()


@pytest.mark.parametrize("first", [True, False])
def test_sparse_gradients_go_through_the_process_group(tmp_path: Path, first: bool) -> None:
    import hook_jobs
    from processes import Job

    with Job(hook_jobs.sparse, 2, tmp_path, first) as job:
        for texts in job.results():
            assert len(texts) == 1  # said once, not at every step
            assert "sparse=False" in texts[0]


def test_a_compiled_model(tmp_path: Path) -> None:
    import hook_jobs
    from processes import Job

    with Job(hook_jobs.compiled, 2, tmp_path) as job:
        job.results()


@pytest.mark.parametrize("view", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_join_with_accumulation(tmp_path: Path, view: bool) -> None:
    import hook_jobs
    from processes import Job

    with Job(hook_jobs.uneven, 3, tmp_path, view) as job:
        for ops in job.results():
            assert len(set(ops)) == 1


def test_strict_gives_the_mean_without_loss(tmp_path: Path) -> None:
    """5 % of all packets are lost: every rank has the mean of all codes, equal to the bit. Rule: clock-34."""
    import hook_jobs
    from processes import Job

    with Job(hook_jobs.exact, 3, tmp_path, 0.05) as job:
        results = job.results()
    for whole, strict, lost, delivered in results:
        assert lost > 0
        assert delivered == 1.0
        assert strict == whole == results[0][0]


def test_two_models_in_a_process_and_workers_of_a_data_loader(tmp_path: Path) -> None:
    import hook_jobs
    from processes import Job
    from torch_jobs import BOUND

    with Job(hook_jobs.beside, 2, tmp_path) as job:
        for errors in job.results():
            assert len(errors) == 16
            assert max(errors) <= 3 * BOUND
            assert sum(errors) / len(errors) <= BOUND
