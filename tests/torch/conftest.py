"""Jobs of real processes as one call: ``run("torch_jobs.parity", 2)`` gives what every rank returned."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import Job, Run

BACKENDS = {
    "backend_jobs": "tailbound", "elastic": "elastic", "loop_jobs.killed": "elastic", "loop_jobs.barred": "elastic",
}  # fmt: skip


def _named(job: str) -> Callable[..., Any]:
    """A function of ``tests/jobs``: these import PyTorch, so nobody does before a test runs."""
    module, _, name = job.partition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _backend(jobs: str) -> str:
    """What jobs of the backend or of ranks that come back run over; all others run over Gloo."""
    return next((kind for name, kind in BACKENDS.items() if name in jobs), "gloo")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a job ``module.function`` in so many processes; its other arguments follow the rank.

    ``last_dies``: the last rank kills itself; the results are those of the others.
    """

    def results(job: str, ranks: int, *arguments: Any, backend: str = "", last_dies: bool = False) -> list[Any]:
        with Job(
            _named(job), ranks, tmp_path, *arguments, backend=backend or _backend(f"{job} {arguments}")
        ) as started:
            return [started.result(rank) for rank in range(ranks - 1)] if last_dies else started.results()

    return results
