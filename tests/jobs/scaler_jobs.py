"""What the processes of the tests of the gradient scaler do; one function a job."""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from resync_jobs import everywhere, state_digest
from support import Trouble
from tailbound.errors import ConfigError
from tailbound.torch import GradScaler, TailboundState, register
from tailbound.torch.scaler import adopt
from torch_jobs import BOUND, PATIENT, batch, gradient, model, nmse, patient

#: What a step of a rank came to: loss scale before and after, whether the parameters moved, their digest.
Step = tuple[float, float, bool, str]


def train(
    net: DDP,
    state: TailboundState,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    rank: int,
    ill: list[Collection[int]],
) -> list[Step]:
    """A step per entry of ``ill``, which are the ranks whose gradients overflow in it."""
    steps = []
    for number, ranks in enumerate(ill):
        before, scale = state_digest(net, optimizer), scaler.get_scale()
        optimizer.zero_grad()
        data, target = batch(rank, number)
        loss = nn.functional.cross_entropy(net(data), target)
        scaler.scale(loss * (float("inf") if rank in ranks else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        after = state_digest(net, optimizer)
        steps.append((scale, scaler.get_scale(), before != after, after))
    return steps


def overflowing(rank: int, ill: list[Collection[int]]) -> dict[str, Any]:
    """Trains with a scaler while some ranks overflow and packets of all ranks get lost."""
    net = DDP(model(), bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    with register(net, optimizer=optimizer, **patient(resync_period=0)) as state:
        assert state.communicator is not None
        Trouble(seed=7, loss=0.05).attach(state.communicator)
        scaler = GradScaler(state, init_scale=2.0**10, growth_interval=100)
        steps = train(net, state, optimizer, scaler, rank, ill)
        stats = state.stats()
    return {"steps": steps, "stats": stats}


def stock(rank: int, ill: list[Collection[int]]) -> list[Step]:
    """Trains with torch's own scaler, which ``register`` is not told of."""
    net = DDP(model(), bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    with register(net, optimizer=optimizer, **patient(resync_period=0)) as state:
        steps = train(net, state, optimizer, scaler, rank, ill)
        assert state.scaler is scaler
    return steps


def strange(rank: int) -> list[str]:
    """Scalers that cannot be taken in are refused before they step, and one on a single rank by the first average."""
    said = []

    class Mine(torch.amp.GradScaler):
        pass

    net, other = DDP(model()), DDP(model())
    both = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (net, other)]
    with register(net, optimizer=optimizers[0], **PATIENT) as state, register(other, **PATIENT) as second:
        parameters = [*net.parameters(), *other.parameters()]
        before = [p.detach().clone() for p in parameters]
        for scaler, one, optimizer in ((Mine("cpu"), net, optimizers[0]), (both, other, optimizers[1])):
            if scaler is both:
                adopt(state, both)
            scaler.scale(nn.functional.cross_entropy(*_fed(one, rank))).backward()
            with pytest.raises(ConfigError) as caught:
                scaler.step(optimizer)
            said.append(str(caught.value))
        assert second.scaler is None
        assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    alone = DDP(model())
    with register(alone, **PATIENT) as state:
        if rank == 0:
            GradScaler(state)
        with pytest.raises(Exception, match="use of a loss scale") as failed:
            nn.functional.cross_entropy(*_fed(alone, rank)).backward()
        said.append(str(failed.value))
    return said


def _fed(net: nn.Module, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    data, target = batch(rank, 0)
    return net(data), target


def unlike(rank: int) -> None:
    """Ranks whose scales differ average the same gradient; what is not for a scaler is refused; one rank is torch's."""
    net, plain = DDP(model(), bucket_cap_mb=0.05), DDP(model(), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    with register(net, optimizer=optimizer, **patient(resync_period=0)) as state:  # else they would be made equal
        scaler = GradScaler(state, init_scale=2.0 ** (8 + 4 * rank))
        for step in range(3):
            for one in (net, plain):
                one.zero_grad()
                data, target = batch(rank, step)
                loss = nn.functional.cross_entropy(one(data), target)
                (scaler.scale(loss) if one is net else loss).backward()
            value = gradient(net) / scaler.get_scale()
            assert nmse(value, gradient(plain)) <= 3 * BOUND
            digests = everywhere(value.sum().item())
            assert len(set(digests)) == 1
            assert scaler.get_scale() == 2.0 ** (8 + 4 * rank)
            scaler.unscale_(optimizer)
            assert torch.equal(gradient(net), value)
            scaler.step(optimizer)
            scaler.update()
        with pytest.raises(ConfigError, match="already"):
            GradScaler(state)
        scaler.update(4.0)  # by hand, as in torch; here on all ranks
        assert scaler.get_scale() == 4.0


def saved(rank: int) -> tuple[float, float, int]:
    """A scaler's state through a checkpoint, into another scaler of ours, and into torch's and back."""
    scales = []
    net = DDP(model(), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    with register(net, optimizer=optimizer, **PATIENT) as state:
        scaler = GradScaler(state, init_scale=2.0**10, growth_interval=4)
        train(net, state, optimizer, scaler, rank, [(), (), (0, 1), (), ()])
        file = io.BytesIO()
        torch.save(scaler.state_dict(), file)
        scales.append(scaler.get_scale())
    file.seek(0)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(torch.load(file, weights_only=True))
    other = DDP(model(), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(other.parameters(), 0.05)
    with register(other, optimizer=optimizer, **PATIENT) as state:
        scaler = GradScaler(state)
        scaler.load_state_dict(theirs.state_dict())
        scales.append(scaler.get_scale())
        tracker = scaler.state_dict()["_growth_tracker"]
        steps = train(other, state, optimizer, scaler, rank, [(), (), ()])
        # two clean steps before, two of these: it grows
        assert [after for _, after, _, _ in steps] == [scales[0], 2 * scales[0], 2 * scales[0]]
    return scales[0], scales[1], tracker
