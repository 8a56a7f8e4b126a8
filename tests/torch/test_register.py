"""``register``: what it refuses or warns of besides options, and what it leaves behind; in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("torch")


def test_the_ring_follows_the_model(tmp_path: Path) -> None:
    import register_jobs
    from processes import Job

    with Job(register_jobs.rings, 2, tmp_path) as job:
        job.results()


def test_too_many_buckets_are_refused(tmp_path: Path) -> None:
    import register_jobs
    from processes import Job

    with Job(register_jobs.many_buckets, 2, tmp_path) as job:
        job.results()


def test_parameters_that_ddp_ignores_are_refused(tmp_path: Path) -> None:
    import register_jobs
    from processes import Job

    with Job(register_jobs.ignored, 2, tmp_path) as job:
        job.results()


def test_collectives_in_a_pass_are_warned_of_and_no_rank_skips_one(tmp_path: Path) -> None:
    import register_jobs
    from processes import Job

    with Job(register_jobs.collectives, 2, tmp_path) as job:
        job.results()


def test_an_optimizer_with_collectives_is_refused_before_a_step(tmp_path: Path) -> None:
    import register_jobs
    from processes import Job

    with Job(register_jobs.optimizers, 2, tmp_path) as job:
        job.results()


def test_what_is_refused_late_leaves_no_job_behind(tmp_path: Path) -> None:
    import register_jobs
    from processes import Job

    with Job(register_jobs.refused_late, 2, tmp_path) as job:
        job.results()


def test_a_job_ends_with_its_model(tmp_path: Path) -> None:
    import register_jobs
    from processes import Job

    with Job(register_jobs.dropped, 2, tmp_path) as job:
        assert job.results() == [{"kept": True, "threads": False, "left": False}] * 2


def test_a_compiled_step_leaves_the_hook_alone(tmp_path: Path) -> None:
    import register_jobs
    from processes import Job

    with Job(register_jobs.compiled_step, 2, tmp_path) as job:
        assert job.results() == [[False, False]] * 2
