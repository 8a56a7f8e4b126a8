"""A training that goes on from the checkpoint of a run with another number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tailbound.torch
from resync_jobs import state_digest
from torch_jobs import PATIENT, same_everywhere


def sample(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve points of a fixed function; every rank takes its part of them."""
    data = torch.randn(12, 16, generator=torch.Generator().manual_seed(step))
    return data, data[:, :4].sin()


def train(rank: int, checkpoint: Path, steps: int) -> dict[str, Any]:
    """Trains for ``steps`` steps and saves; ends the process group."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    state = tailbound.torch.register(net, optimizer=optimizer, **PATIENT)
    scaler = tailbound.torch.GradScaler(state, init_scale=2.0**8, growth_interval=5)
    begin = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        net.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        state.load_state_dict(saved["tailbound"])
        begin = saved["step"]
    losses, scales = [], []
    for step in range(begin, begin + steps):
        data, target = (part.chunk(ranks)[rank] for part in sample(step))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(data), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    state.synchronize()
    assert same_everywhere(state_digest(net, optimizer))
    if rank == 0:
        parts = {"model": net.module, "optimizer": optimizer, "scaler": scaler, "tailbound": state}
        torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": begin + steps}, checkpoint)
    stats = state.stats()
    state.close()
    state.close()  # may be called twice
    dist.destroy_process_group()
    told = {"losses": losses, "scales": scales, "history": stats["history"], "begin": begin}
    return told | {"ops": stats["counters"]["ops"]}
