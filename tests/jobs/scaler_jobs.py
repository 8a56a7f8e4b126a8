"""What the processes of the tests of the gradient scaler do; one function a job."""

from __future__ import annotations

import io
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_jobs as jobs
from support import Trouble
from tailbound.torch import GradScaler, register
from tailbound.torch.scaler import adopt

#: What a step of a rank came to: loss scale before and after, whether the parameters moved, their digest.
Step = tuple[float, float, bool, str]


def scaled(
    net: DDP, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, rank: int, ill: list[Collection[int]]
) -> list[Step]:
    """A step per entry of ``ill``, which are the ranks whose gradients overflow in it."""
    steps = []
    for number, ranks in enumerate(ill):
        before, scale = jobs.state_digest(net, optimizer), scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale(jobs.loss(net, rank, number) * (float("inf") if rank in ranks else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        after = jobs.state_digest(net, optimizer)
        steps.append((scale, scaler.get_scale(), before != after, after))
    return steps


def stock(rank: int, here: int, ill: list[Collection[int]], loss: float = 0.0) -> None:
    """Torch's own scaler, which ``register`` is not told of, backs off by each overflow, of any rank of a host.

    All steps and scales are the same everywhere. Where all hosts overflow, no rank steps by zeros. Of all packets
    ``loss`` get lost.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    with jobs.training(**jobs.on_hosts(rank, here), **jobs.patient(resync_period=0)) as (net, optimizer, state):
        Trouble(seed=7, loss=loss).attach(state.communicator)
        steps = scaled(net, optimizer, scaler, rank, ill)
        assert state.scaler is scaler
        assert type(scaler) is GradScaler
    hosts = dist.get_world_size() // here
    assert [moved for _, _, moved, _ in steps] == [len({one // here for one in ranks}) < hosts for ranks in ill]
    assert [before / after for before, after, _, _ in steps] == [2 if ranks else 1 for ranks in ill]
    assert loss or jobs.same_everywhere([digest for _, _, _, digest in steps])


def strange(rank: int) -> None:
    """Scalers that cannot be taken in are refused before they step, and one on a single rank by the first average."""

    class Mine(torch.amp.GradScaler):
        pass

    net, other = DDP(jobs.model()), DDP(jobs.model())
    both = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (net, other)]
    with register(net, optimizer=optimizers[0], **jobs.PATIENT) as state, register(other, **jobs.PATIENT) as second:
        parameters = [*net.parameters(), *other.parameters()]
        before = [p.detach().clone() for p in parameters]
        for scaler, one, optimizer, words in (
            (Mine("cpu"), net, optimizers[0], "Mine scales the loss"),
            (both, other, optimizers[1], "GradScaler"),
        ):
            if scaler is both:
                adopt(state, both)
            scaler.scale(jobs.loss(one, rank, 0)).backward()
            refusal = jobs.refused(words, lambda scaler=scaler, optimizer=optimizer: scaler.step(optimizer))
            assert scaler is both or "one for each registered model" in refusal
        assert second.scaler is None
        assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    alone = DDP(jobs.model())
    with register(alone, **jobs.PATIENT) as state:
        if rank == 0:
            GradScaler(state)
        loss = jobs.loss(alone, rank, 0)
        said = jobs.refused("use of a loss scale", loss.backward, Exception)
        assert "rank 0" in said
        assert "rank 1" in said


def unlike(rank: int) -> None:
    """Ranks whose scales differ average the same gradient; what is not for a scaler is refused; one rank is torch's."""
    plain = DDP(jobs.model(), bucket_cap_mb=0.05)
    # else they would be made equal
    with jobs.training(torch.optim.SGD, 0.0, **jobs.patient(resync_period=0)) as (net, optimizer, state):
        scaler = GradScaler(state, init_scale=2.0 ** (8 + 4 * rank))
        for step in range(3):
            for one in (net, plain):
                one.zero_grad()
                loss = jobs.loss(one, rank, step)
                (scaler.scale(loss) if one is net else loss).backward()
            value = jobs.gradient(net) / scaler.get_scale()
            assert jobs.nmse(value, jobs.gradient(plain)) <= 3 * jobs.BOUND
            assert jobs.same_everywhere(value.sum().item())
            assert scaler.get_scale() == 2.0 ** (8 + 4 * rank)
            scaler.unscale_(optimizer)
            assert torch.equal(jobs.gradient(net), value)
            scaler.step(optimizer)
            scaler.update()
        jobs.refused("already", lambda: GradScaler(state))
        scaler.update(4.0)  # by hand, as in torch; here on all ranks
        assert scaler.get_scale() == 4.0


def saved(rank: int) -> None:
    """A scaler's state through a checkpoint, into another scaler of ours, and into torch's and back."""
    kept = 2.0**10 / 2
    with jobs.training(torch.optim.SGD, 0.05, **jobs.PATIENT) as (net, optimizer, state):
        scaler = GradScaler(state, init_scale=2.0**10, growth_interval=4)
        scaled(net, optimizer, scaler, rank, [(), (), (0, 1), (), ()])
        file = io.BytesIO()
        torch.save(scaler.state_dict(), file)
        assert scaler.get_scale() == kept
    file.seek(0)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(torch.load(file, weights_only=True))
    with jobs.training(torch.optim.SGD, 0.05, **jobs.PATIENT) as (other, optimizer, state):
        scaler = GradScaler(state)
        scaler.load_state_dict(theirs.state_dict())
        assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (kept, 2)
        steps = scaled(other, optimizer, scaler, rank, [(), (), ()])
        # two clean steps before, two of these: it grows
        assert [after for _, after, _, _ in steps] == [kept, 2 * kept, 2 * kept]
