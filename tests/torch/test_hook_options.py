"""The hook beside DDP's options, torch's wrappers, sparse gradients and the compiler, in real processes."""

from __future__ import annotations

import pytest

from processes import Run

pytestmark = pytest.mark.needs("torch")


def test_what_ddp_and_others_do_around_the_hook(run: Run) -> None:
    """Unused and frozen parameters, torch's compression wrappers, sparse gradients."""
    run("processes.in_turn", 2, "hook_jobs.unused", "hook_jobs.wrapped", "hook_jobs.sparse")


def test_a_compiled_model(run: Run) -> None:
    run("hook_jobs.compiled", 2)


def test_join_with_accumulation(run: Run) -> None:
    for ops in run("hook_jobs.uneven", 3):
        assert len(set(ops)) == 1


def test_two_models_in_a_process_and_workers_of_a_data_loader(run: Run) -> None:
    from torch_jobs import BOUND

    for errors in run("hook_jobs.beside", 2):
        assert len(errors) == 16
        assert max(errors) <= 3 * BOUND
        assert sum(errors) / len(errors) <= BOUND
