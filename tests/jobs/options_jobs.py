"""What the processes of the tests of the algorithm's options do; one function a job."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tailbound.errors import ConfigError
from tailbound.torch import GradScaler, TailboundState, register
from tailbound.torch.options.schedule import SETTLING
from tailbound.torch.sparse import average_sparse
from tailbound.wire.bits import Bits
from torch_jobs import PATIENT, backward, batch, digest, gradient, model, nmse, same_everywhere


def _gradients(bits: Bits, steps: range, **options: Any) -> list[float]:
    """NMSE of each step's average against plain DDP's."""
    rank, errors = dist.get_rank(), []
    plain, ours = DDP(model(), bucket_cap_mb=0.05), DDP(model(), bucket_cap_mb=0.05)
    with register(ours, bits=bits, **options, **PATIENT) as state:
        for step in steps:
            for net in (plain, ours):
                net.zero_grad()
                backward(net, rank, step)
            errors.append(nmse(gradient(ours), gradient(plain)))
            assert same_everywhere(digest(ours)), step
            assert state.last.error is None
    return errors


def any_bits(rank: int) -> dict[str, list[float]]:
    """The average at every number of bits, with and without error feedback; and with 16 bits in the first two steps."""
    return {
        "16": _gradients(16, range(4)),
        "fine": _gradients(8, range(4), fine_steps=2, balance=True, error_feedback=True),
        "8": _gradients(8, range(4), error_feedback=True),
        "4": _gradients(4, range(4), error_feedback=False),
        "4,8": _gradients((4, 8), range(4), error_feedback=False),
    }


def switching(rank: int) -> list[float]:
    """Bits that change between steps, on all ranks alike; then on one rank alone."""
    numel, errors = 30_000, []

    def data(of: int, step: int) -> torch.Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + of))

    with TailboundState(**PATIENT) as state:
        for step, bits in enumerate((8, (4, 8), 16, 16, 4, 8)):
            state.bits = bits
            out = state.average(0, data(rank, step), True).wait()
            exact = sum(data(r, step) for r in range(dist.get_world_size())) / dist.get_world_size()
            errors.append(nmse(out.double(), exact.double()))
        state.bits = 16 if rank else 8
        with pytest.raises(Exception, match="disagree"):
            state.average(0, data(rank, 9), True).wait()
    return errors


def feedback(rank: int) -> dict[str, float]:
    """The same gradient again and again, in codes of 4 bits, 64 entries in one place far beyond their reach.

    Returns:
        NMSE of the mean over all steps against the exact average, with error feedback (the default) and without.
    """
    numel, steps, found = 20_000, 30, {}
    data = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    data[500:564] *= 100
    exact = data.clone()
    dist.all_reduce(exact)
    exact /= dist.get_world_size()
    for name, option in (("with", None), ("without", False)):
        total = torch.zeros(numel, dtype=torch.float64)
        with TailboundState(bits=4, error_feedback=option, **PATIENT) as state:
            for _ in range(steps):
                total += state.average(0, data.clone(), True).wait().double()
        found[name] = nmse(total / steps, exact.double())
    return found


def _train(
    schedule: str, steps: int, dtype: torch.dtype = torch.float32, *, scaled: bool = False
) -> tuple[DDP, dict[str, Any]]:
    """A model after ``steps`` steps with codes of 16 bits, whose error is far below what is compared.

    If ``scaled``, with a loss scale that grows at every second step.
    """
    rank = dist.get_rank()
    net = DDP(model().to(dtype), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    with register(net, optimizer=optimizer, schedule=schedule, bits=16, **PATIENT) as state:
        scaler = GradScaler(state, init_scale=2.0**10, growth_interval=2, enabled=scaled)
        for step in range(steps):
            optimizer.zero_grad()
            data, target = batch(rank, step, dtype)
            scaler.scale(nn.functional.cross_entropy(net(data).float(), target)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() > 2.0**10 or not scaled
        if schedule == "delayed":
            assert state.apply_pending()
            assert not state.apply_pending()
        state.synchronise()
        stats = state.stats()
    return net, stats


def _by_hand(steps: int, ranks: int, *, delayed: bool) -> torch.nn.Module:
    """The same training in one process, with exact averages, those from the fourth step on applied one step later."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    waiting: list[torch.Tensor] | None = None
    for step in range(steps + delayed):
        averages: list[torch.Tensor] | None = [torch.zeros_like(p) for p in net.parameters()]
        assert averages is not None
        for rank in range(ranks) if step < steps else ():
            alone = copy.deepcopy(net)
            alone.zero_grad()
            backward(alone, rank, step)
            for total, p in zip(averages, alone.parameters(), strict=True):
                total += p.grad / ranks
        if delayed and step >= 3:
            averages, waiting = waiting or [torch.zeros_like(p) for p in net.parameters()], averages
        for p, average in zip(net.parameters(), averages, strict=True):
            p.grad = average
        optimizer.step()
    return net


def _distance(net: torch.nn.Module, other: torch.nn.Module) -> float:
    """Squared distance over squared length of what training has changed."""
    flat = [torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in (net, other, model())]
    return float((flat[0] - flat[1]).square().sum() / (flat[1] - flat[2]).square().sum())


def schedules(rank: int, steps: int) -> dict[str, Any]:
    """Parameters after training, against the same done by hand; and what would be wrong."""
    ranks = dist.get_world_size()
    together, later = _by_hand(steps, ranks, delayed=False), _by_hand(steps, ranks, delayed=True)
    delayed, delayed_stats = _train("delayed", steps)
    scaled, _ = _train("delayed", steps, scaled=True)
    _train("delayed", 5, torch.bfloat16)
    flat = [torch.cat([p.detach().flatten() for p in net.parameters()]) for net in (delayed, scaled)]
    return {
        "delayed": _distance(delayed, later),
        "delayed, scaled": _distance(scaled, later),
        "delayed, wrong": _distance(delayed, together),
        "equal": all(same_everywhere(f.numpy().tobytes()) for f in flat),
        "bubbles": delayed_stats["bubbles"],
    }


def delayed(rank: int, kind: str) -> list[float]:
    """Averages as they are handed out, under loss scales that change: NMSE against those of the steps they are of.

    Sparse ones are refused.
    """
    numel, dtype, scales, errors = 50_000, getattr(torch, kind), (8.0, 8.0, 4.0, 4.0, 4.0, 2.0, 1.0, 8.0), []
    ranks, before = dist.get_world_size(), torch.zeros(numel, dtype=torch.float64)

    def data(of: int, step: int) -> torch.Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + of)).to(dtype)

    with TailboundState(schedule="delayed", **PATIENT) as state:
        for step, scale in enumerate(scales):
            state.loss_scale = scale
            exact = sum(data(r, step).double() for r in range(ranks)) / ranks
            out = state.average(0, data(rank, step) * scale, True).wait()
            assert out.dtype == dtype
            if step < SETTLING:
                errors.append(nmse(out.double() / scale, exact))
            elif step == SETTLING:
                assert not out.any()
            else:
                errors.append(nmse(out.double() / scale, before))
            before = exact
        with pytest.raises(ConfigError, match="sparse=False"):
            average_sparse(state, 0, torch.eye(4).to_sparse(), True)
    return errors


def in_place(rank: int, kind: str) -> None:
    """Averages lie where the gradients were, also with another loss scale or one that is not finite; unless needed."""
    dtype, ranks = getattr(torch, kind), dist.get_world_size()

    def data(of: int, step: int) -> torch.Tensor:
        return torch.randn(5000, generator=torch.Generator().manual_seed(100 * step + of)).to(dtype)

    for options in ({}, {"schedule": "delayed"}):
        with TailboundState(**options, **PATIENT) as state:
            for step, scale in enumerate((1.0, 1.0, 8.0, 8.0)):
                state.loss_scale = scale
                gradient = data(rank, step) * scale
                giving = range(ranks)
                if step == 3 and rank == 0:
                    gradient[7] = torch.nan
                if step == 3:
                    giving = range(1, ranks)
                out = state.average(0, gradient, True).wait()
                assert (out.data_ptr() == gradient.data_ptr()) == (not options), options
                if not state.schedule.waits:
                    exact = sum(data(r, step).double() for r in giving) / len(giving)
                    assert nmse(out.double() / scale, exact) < 1e-2, (step, options)
