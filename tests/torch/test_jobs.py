"""Jobs of real processes that check themselves, against plain DDP, HSDP and Gloo on loopback.

Each is a function of ``tests/jobs``, whose docstring says what it shows; ``python -m pytest -k`` finds it by its title.
Which ops are void, who takes what from whom, and whole iterations are tested without processes (``tests/sim``,
``tests/unit``).
"""

from __future__ import annotations

from typing import Any

import pytest

from processes import Run

pytestmark = pytest.mark.needs("torch")


def turns(module: str, *names: str) -> tuple[str, ...]:
    """Jobs that the same processes do one after the other."""
    return "processes.in_turn", *(f"{module}.{name}" for name in names)


#: Loops that need nothing of their own.
LOOPS = (
    "plain", "accumulating", "accumulating_unsynced", "clipping", "shared", "gan", "sam", "lbfgs", "teacher", "static",
)  # fmt: skip
#: How many processes of which job, with what besides the rank, by title.
JOBS: dict[str, tuple[Any, ...]] = {
    # the hook of DDP
    "gradients are those of plain DDP": (2, "torch_jobs.parity"),
    "scales are those of the tensors when DDP orders its bucket anew": (2, "hook_jobs.rebuilt"),
    "a rank with NaN abstains": (3, "torch_jobs.abstaining", 1),
    "bits change, error feedback says what codes clip; other buckets, options and states are refused": (
        2, *turns("torch_jobs", "switching", "feedback", "refusals"),
    ),
    "loops train as under plain DDP": (3, "loop_jobs.parity", 1, *LOOPS, "sparse", "joined", "unused", "compiled"),
    "torch's compression wrappers, and a compiled backward pass": (2, *turns("hook_jobs", "wrapped", "compiled")),
    "two models in a process and workers of a data loader": (2, "hook_jobs.beside"),
    # register, and what it leaves behind
    "the ring follows the model, and what register refuses leaves no job behind": (
        2, *turns("register_jobs", "rings", "refusals", "collectives", "optimizers"),
    ),
    "a job ends with its model": (2, "register_jobs.dropped"),
    "a compiled step leaves the hook alone": (2, "register_jobs.compiled_step"),
    # buckets that go the way of a device; train is the job of test_cuda, so that what it asks for is known to be right
    "a device that fails fails the backward pass": (2, "device_jobs.failing"),
    "a device trains and synchronizes": (2, "device_jobs.train", "cpu", "bfloat16"),
    # replicas that come apart
    "slices make a rank equal that has lost results": (3, "resync_jobs.drifting"),
    "the others wait for a rank that holds": (3, "resync_jobs.holding"),
    "a rank that keeps the GIL once it has launched holds up no other": (3, "resync_jobs.keeping"),
    "a model that is detached goes on as plain DDP": (3, "hook_jobs.detached"),
    # loss scales
    "a rank that overflows lowers the scale of all, while packets get lost": (
        3, "scaler_jobs.stock", 1, [(), (1,), (), (), (2,), (), (), ()], 0.05,
    ),
    "torch's scaler backs off, also in the first step": (
        3, "scaler_jobs.stock", 1, [(0, 1, 2), (), (1,), (), (0, 1, 2), (), ()],
    ),
    "scalers: some are refused, scales may differ, and a checkpoint keeps them": (
        2, *turns("scaler_jobs", "strange", "unlike", "saved"),
    ),
    # several ranks a host: two hosts of two
    "hosts: gradients are those of plain DDP": (4, "node_jobs.parity", "host"),
    "hosts: buckets on a device are shared in one order": (4, "node_jobs.parity", "device"),
    "hosts: replicas are made equal, and one rank that holds alone holds its host": (
        4, *turns("node_jobs", "equal", "holding", "held_at_a_boundary"),
    ),
    "hosts: one with NaN stays out of the mean": (4, "torch_jobs.abstaining", 2),
    "hosts: ranks have one loss scale": (
        4, "scaler_jobs.stock", 2, [(), (1,), (), (0, 3), (), (2,), (), (), ()],
    ),
    "hosts: loops train as under plain DDP": (4, "loop_jobs.parity", 2, *LOOPS, "sparse"),
    "hosts: what cannot be is refused": (4, "node_jobs.refusals"),
    "one host needs no job": (2, "node_jobs.one_host"),
    # FSDP2
    "FSDP: gradients are those of plain HSDP and of DDP, and replicas are made equal": (
        4, *turns("fsdp_jobs", "parity", "unlike", "overlapping", "equal_replicas", "voided", "refusals"),
    ),
    "FSDP: one host": (2, "fsdp_jobs.alone"),
    # the backend of torch.distributed
    "backend: unasked everything is as over Gloo": (3, "backend_jobs.collectives"),
    "backend: Gloo's threads, or a model, hold the last reference": (2, *turns("backend_jobs", "dropped", "outlived")),
    "backend: some kinds are bounded, steps end where the caller says, and ranks that disagree are named": (
        2, *turns("backend_jobs", "kinds", "told", "disagreement", "refusals"),
    ),
    "backend: DDP with and without a hook": (2, "backend_jobs.training"),
    "backend: compiled steps": (2, "backend_jobs.compiled"),
    # ranks that come back
    "elastic: the group has no collectives": (2, "elastic_jobs.no_collectives"),
    "elastic: what DDP gets wrong alone is refused": (2, "elastic_jobs.wrong"),
    "elastic: trainers refuse it": (2, "trainer_jobs.elastic"),
    # codes over TCP, beside which benchmarks measure Tailbound
    "codes over TCP give every rank the mean": (4, "quantised_jobs.means"),
    "codes over TCP train as Gloo does": (2, "quantised_jobs.training"),
}  # fmt: skip
#: What some need besides.
NEEDS = {"trainer_jobs.elastic": (pytest.mark.needs("accelerate", "lightning", "transformers"),)}


@pytest.mark.parametrize(
    ("ranks", "job", "arguments"),
    [
        pytest.param(ranks, job, arguments, id=title, marks=NEEDS.get(job, ()))
        for title, (ranks, job, *arguments) in JOBS.items()
    ],
)
def test_a_job_checks_itself(run: Run, ranks: int, job: str, arguments: list[Any]) -> None:
    """Rules: clock-16, clock-21, clock-25, clock-38, codec-1, codec-12, codec-13."""
    run(job, ranks, *arguments, backend="elastic" if job == "trainer_jobs.elastic" else "")
