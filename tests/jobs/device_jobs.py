"""What the processes of the device tests do: with buckets that go the way of a device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_jobs as jobs
from plain_form import PLAIN
from tailbound.torch import register, state
from tailbound.torch.paths import Paths


def failing(rank: int) -> None:
    """Rank 0's device fails in the second step: its backward pass says so, and does not hang.

    The other rank leaves meanwhile.
    """
    where = torch.device("cpu")
    if rank == 0:
        state.Paths = functools.partial(Paths, host_form=PLAIN)  # type: ignore[assignment, misc]
    net = DDP(jobs.model())
    with register(net, **jobs.PATIENT) as own:
        jobs.backward(net, rank, 0)
        assert own.stats().get("device_codec") == ({"cpu": "plain"} if rank == 0 else None)
        loss = jobs.loss(net, rank, 0)  # DDP talks to the other rank in here
        if rank == 1:
            return

        def use(mark: Any = None) -> Any:
            raise RuntimeError("the device is gone")

        own.paths.of(where).stream.use = use  # type: ignore[method-assign]
        jobs.refused("the device is gone", loss.backward, Exception)


def train(rank: int, device: str, kind: str) -> None:
    """Gradients, the averages of a late step and the re-synchronized state of a model on ``device``."""
    where, dtype = torch.device(device), getattr(torch, kind)
    plain = DDP(jobs.model().to(where, dtype), bucket_cap_mb=0.05)
    ours = DDP(jobs.model().to(where, dtype), bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(ours.parameters(), 1e-3, eps=1e-4)  # 1e-8 is 0 in half precision, and so are squares
    with register(ours, optimizer=optimizer, **jobs.PATIENT) as own:
        if where.type == "cpu":
            own.paths = Paths(host_form=PLAIN)
        for step in range(5):
            jobs.check_step(plain, ours, rank, step, dtype)
            optimizer.step()
            with torch.no_grad():  # the next gradients are compared at the same place
                for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
                    p.copy_(q)
        if rank == 1:  # drift apart, by hand, and come together again
            with torch.no_grad():
                next(ours.parameters()).zero_()
            assert own.resync is not None
            own.resync.unsound()
        assert own.synchronize(60)
        assert jobs.same_everywhere(jobs.state_digest(ours, optimizer))
        counters = own.stats()["replica"]["counters"]
    assert sum(jobs.errors) / len(jobs.errors) <= jobs.BOUND
    assert bool(counters.get("slices_taken", 0)) == (rank == 1)
