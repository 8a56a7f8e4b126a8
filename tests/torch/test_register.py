"""``register``: what it refuses or warns of besides options, and what it leaves behind; in real processes."""

from __future__ import annotations

import pytest

from processes import Run

pytestmark = pytest.mark.needs("torch")


def test_what_is_refused_or_warned_of_and_leaves_no_job_behind(run: Run) -> None:
    """The ring follows the model; too many buckets, ignored parameters and collectives within a pass are named."""
    jobs = ("rings", "many_buckets", "ignored", "collectives", "optimizers", "refused_late")
    run("processes.in_turn", 2, *(f"register_jobs.{job}" for job in jobs))


def test_a_job_ends_with_its_model(run: Run) -> None:
    assert run("register_jobs.dropped", 2) == [{"kept": True, "threads": False, "left": False}] * 2


def test_a_compiled_step_leaves_the_hook_alone(run: Run) -> None:
    assert run("register_jobs.compiled_step", 2) == [[False, False]] * 2
