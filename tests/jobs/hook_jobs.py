"""What the processes of the further tests of the hook do: what DDP and others do around it, and the way back to DDP."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_jobs as jobs
from resync_jobs import SETTINGS
from tailbound.errors import ConfigError
from tailbound.torch import TailboundState, allreduce_hook, batches, register


class Shuffled(nn.Module):
    """Layers whose gradients become ready in another order than that of the first step's bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small, self.tiny = (nn.Linear(256, 256, bias=False) for _ in range(3))
        self.empty = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))  # in a bucket of its own

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return 1e-3 * self.small(data) + self.large(data) + 1e-3 * self.tiny(data) + self.empty.sum()


def rebuilt(rank: int) -> None:
    """The layer with the largest gradients keeps its scales; DDP orders its bucket anew after the first step.

    A bucket of the same size kept the scales of other tensors, and clipped a layer by 14 %.
    """
    plain, ours = DDP(Shuffled()), DDP(Shuffled())
    with register(ours, **jobs.PATIENT) as state:
        for step in range(4):
            data = torch.randn(64, 256, generator=torch.Generator().manual_seed(10 * step + rank))
            for net in (plain, ours):
                net.zero_grad()
                net(data).square().mean().backward()
            value, exact = (net.module.large.weight.grad.flatten().double() for net in (ours, plain))
            assert jobs.nmse(value, exact) <= jobs.BOUND, step
        assert sorted(bucket.numel > 0 for bucket in state.layout.step()) == [False, True]


def memory(rank: int, ours: bool) -> tuple[int, int, int]:
    """Entries of a model of one bucket a step, what six steps have added to this process, and what the rings take."""
    net = DDP(nn.Linear(4896, 4896, bias=False), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    options = {name: value for name, value in jobs.PATIENT.items() if name != "ring_mib"}
    entries = sum(p.numel() for p in net.parameters())
    with register(net, optimizer=optimizer, **options) if ours else contextlib.nullcontext() as state:
        before = resident()
        for step in range(6):
            optimizer.zero_grad()
            data = torch.randn(2, 4896, generator=torch.Generator().manual_seed(100 * step + rank))
            net(data).square().mean().backward()
            optimizer.step()
        rings = 0
        if state is not None and state.communicator is not None:
            rings = state.communicator.rings((entries,))[2]
        return entries, resident() - before, rings


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def wrapped(rank: int) -> None:
    """The wrappers of torch around our hook."""
    bf16 = default_hooks.bf16_compress_wrapper(allreduce_hook)

    # DDP refuses a hook of bf16_compress_wrapper's name without NCCL, whatever it wraps
    def named(state: TailboundState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return bf16(state, bucket)

    named.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    for dtype, hook in ((torch.float16, default_hooks.fp16_compress_wrapper(allreduce_hook)), (torch.bfloat16, named)):
        plain, ours = DDP(jobs.model(), bucket_cap_mb=0.05), DDP(jobs.model(), bucket_cap_mb=0.05)
        with TailboundState(**jobs.PATIENT) as state:
            ours.register_comm_hook(state, hook)
            for step in range(4):
                jobs.check_step(plain, ours, rank, step)
            assert {bucket.dtype for bucket in state.layout.step()} == {dtype}
    assert sum(jobs.errors) / len(jobs.errors) <= jobs.BOUND, jobs.errors


def compiled(rank: int) -> None:
    """An error says what to do where the hook of a compiled model gets a tuple."""
    import torch._dynamo

    torch._dynamo.config.optimize_ddp = "python_reducer"
    ours = DDP(jobs.model())
    with register(ours, **jobs.PATIENT):
        fast = torch.compile(ours, backend="eager")
        autograd = torch._dynamo.utils.maybe_enable_compiled_autograd(True)
        with pytest.raises(Exception, match="ddp_optimizer"), autograd:
            jobs.backward(fast, rank, 0)


def beside(rank: int) -> None:
    """Two models in a process, each with a job of its own, fed by processes that a DataLoader forks meanwhile.

    It would not fork by itself here: this process comes from a server, and so would its children.
    """
    nets = [(DDP(jobs.model(seed)), DDP(jobs.model(seed))) for seed in (1, 2)]
    with register(nets[0][0], **jobs.PATIENT) as one, register(nets[1][0], **jobs.PATIENT) as two:
        loader = torch.utils.data.DataLoader(range(4), num_workers=2, multiprocessing_context="fork")
        for _ in range(2):  # workers of the first pass are gone before those of the second are forked
            for step in loader:
                for ours, plain in nets:
                    jobs.check_step(plain, ours, rank, int(step))
        assert (one.communicator.step, two.communicator.step) == (8, 8)
        assert one.stats()["delivered"] == two.stats()["delivered"] == 1.0
        assert one.synchronize()
        assert two.synchronize()
    assert len(jobs.errors) == 16
    assert sum(jobs.errors) / len(jobs.errors) <= jobs.BOUND


def detached(rank: int) -> None:
    """Some steps over Tailbound, then some of plain DDP, in one loop.

    Gradients are the exact mean of all ranks then; nothing is sent any more, and calls that need the job say so.
    """
    net, plain = (DDP(jobs.model(), bucket_cap_mb=0.05) for _ in range(2))
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    state = register(net, optimizer=optimizer, scaler=scaler, **SETTINGS)
    for step in batches(range(10), state):
        jobs.passes([net], rank, step)
        if step >= 5:
            with state.hold():
                plain.load_state_dict(net.state_dict())
                jobs.passes([plain], rank, step)
                assert jobs.nmse(jobs.gradient(net), jobs.gradient(plain)) < 1e-12
        optimizer.step()
        state.boundary()
        if step == 4:
            if rank == 1:  # as of a rank that was away while the others overflowed
                scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**10})
            assert state.detach()
            ops = state.stats()["counters"]["ops"]
    for call in (state.synchronize, state.catch_up, state.detach):
        with pytest.raises(ConfigError, match=f"{call.__name__}.*was detached"):
            call()
    assert state.stats()["counters"]["ops"] == ops
    state.close()
    assert scaler.get_scale() == 2.0**16
    assert jobs.same_everywhere(jobs.state_digest(net, optimizer))
