"""What a rank does whose job loses ranks by ``kill -9`` and gets them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from resync_jobs import state_digest
from tailbound.torch import elastic, register
from torch_jobs import PATIENT, Count, model, patient, refused

#: Deadlines are learned, as in any job.
SETTINGS: dict[str, Any] = {"datapath": "udp", "ring_mib": 8.0, "timeout": 60.0}


def coming_back(rank: int, at: Any, last: Any) -> dict[str, Any]:
    """Trains until ``last`` steps are made; a frozen layer, a scheduler, a gradient scaler, and a count of steps.

    Args:
        at: shared integers, the step that each rank is in.
        last: a shared integer; -1: not known yet.

    Returns:
        ``seen``: by step, what the rank had before it; ``first``: what it began with; ``digest`` and ``synchronized``
        at the end.
    """
    torch.manual_seed(rank)
    frozen = nn.Linear(32, 32).requires_grad_(False)
    net = DDP(nn.Sequential(frozen, model(rank)), process_group=elastic.alone(), bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=7)
    count = Count()
    seen: dict[int, dict[str, Any]] = {}
    extra_state = {"scheduler": scheduler, "count": count}
    first = state_digest(net, optimizer)
    with register(net, optimizer=optimizer, scaler=scaler, extra_state=extra_state, **SETTINGS) as state:
        while not (0 <= last.value <= count.made):
            state.boundary()
            step = count.made
            if not state.outside:
                assert state.resync is not None
                at[rank] = step
                seen[step] = {
                    "state": {
                        "digest": state_digest(net, optimizer), "frozen": frozen.weight.double().sum().item(),
                        "scheduler": scheduler.state_dict(), "scale": scaler.get_scale(),
                    },
                    "sound": state.resync.sound, "waited": set(),
                }  # fmt: skip
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(1000 * step + rank)
            data, target = torch.randn(8, 32, generator=generator), torch.randint(0, 10, (8,), generator=generator)
            scaler.scale(nn.functional.cross_entropy(net(data), target)).backward()
            if step in seen:
                seen[step]["waited"] = state.last.missing - set(state.stats()["suspects"])
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            count.made += 1
        synchronized = state.synchronize(30)
        return {
            "seen": seen, "first": first, "digest": state_digest(net, optimizer), "synchronized": synchronized,
        }  # fmt: skip


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
