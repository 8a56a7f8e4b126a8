"""What a rank does whose job loses ranks by ``kill -9`` and gets them back."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tailbound.torch import elastic, register
from torch_jobs import PATIENT, Count, patient, refused


def no_collectives(rank: int) -> None:
    """The default group refuses what waits for all ranks."""
    tensor = torch.ones(2)
    calls: list[Callable[[], object]] = [
        dist.barrier,
        lambda: dist.all_reduce(tensor),
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.all_gather_object([None, None], rank),
        lambda: DDP(nn.Linear(2, 2)),
    ]
    for call in calls:
        refused("come and go", call, Exception)
    dist.all_reduce(tensor, group=elastic.alone())
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, 2, "tailbound")
    dist.destroy_process_group()


class OpaqueState:
    """Can be saved, and not be loaded as plain types."""


class Crossed(nn.Module):
    """Two layers of one size, which ranks use in different orders."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.layers, self.first = nn.ModuleList(nn.Linear(16, 16) for _ in range(2)), first

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers[1 - self.first](self.layers[self.first](data))
        return out


def wrong(rank: int) -> None:
    """Refuses what DDP over a group of one rank would get wrong, at the start or after the buckets' rebuild.

    That is a map of used parameters of one rank, and buckets that each rank fills in an order of its own.
    """
    unused = DDP(Crossed(0), process_group=elastic.alone(), find_unused_parameters=True)
    plain, count = DDP(nn.Linear(2, 2), process_group=elastic.alone()), Count()
    for state, words in ((lambda: None, "cannot be given"), (OpaqueState(), "torch.load(weights_only=True)")):
        count.made = state  # type: ignore[assignment]
        refusal = refused(words, lambda: register(plain, extra_state={"count": count}, **PATIENT))
        assert "extra_state['count']" in refusal, refusal
    refused("find_unused_parameters=False", lambda: register(unused, **PATIENT))
    net = DDP(Crossed(rank), process_group=elastic.alone())
    with register(net, **patient(deadline_ms=(500.0, 500.0))) as state:
        net(torch.ones(1, 16)).sum().backward()
        assert state.last.error is None
        loss = net(torch.ones(1, 16)).sum()
        text = refused("LayoutError", loss.backward, RuntimeError)  # torch wraps what the hook raises
    assert "disagree on op 1.0" in text, text
    assert "use parameters in the same order" in text, text
