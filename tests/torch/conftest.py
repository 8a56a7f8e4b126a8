"""Jobs of real processes as one call: ``run("hook_jobs.unused", 2)`` gives what every rank returned."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import Job, Run


def _named(job: str) -> Callable[..., Any]:
    """A function of ``tests/jobs``: these import PyTorch, so nobody does before a test runs."""
    module, _, name = job.partition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _backend(job: str) -> str:
    """What jobs of the backend or of ranks that come back run over; all others run over Gloo."""
    return {"backend_jobs": "tailbound", "elastic_jobs": "elastic"}.get(job.partition(".")[0], "gloo")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a job ``module.function`` in so many processes; its other arguments follow the rank."""

    def results(job: str, ranks: int, *arguments: Any, backend: str = "") -> list[Any]:
        with Job(_named(job), ranks, tmp_path, *arguments, backend=backend or _backend(job)) as started:
            return started.results()

    return results


@pytest.fixture
def run_killed(tmp_path: Path) -> Run:
    """As ``run``; the last rank is killed when it says that it is ready. The results are those of the others.

    The job's last two arguments are events: the last rank sets the first one, and nobody the second one.
    """

    def results(job: str, ranks: int, *arguments: Any) -> list[Any]:
        context = multiprocessing.get_context("forkserver")
        ready, die = context.Event(), context.Event()
        with Job(_named(job), ranks, tmp_path, *arguments, ready, die, backend=_backend(job)) as started:
            started.await_event(ready, "the last rank ready to be killed")
            started.processes[-1].kill()
            return [started.result(rank) for rank in range(ranks - 1)]

    return results
