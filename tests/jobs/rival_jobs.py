"""What the processes of the tests of the benchmark's rivals do; one function a job."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tailbound.codec.local import LocalJob
from tailbound_lab.bench.figures import nmse
from tailbound_lab.bench.rivals import RIVALS
from tailbound_lab.bench.rivals.choose import averager
from tailbound_lab.bench.rivals.hook import register_rival
from tailbound_lab.bench.rivals.quantised import WIDTH
from torch_jobs import batch, model


def means(rank: int, numel: int, rounds: int) -> dict[str, list[float]]:
    """By rival the error of each round's mean: against the exact one, of codes against what our codec makes of them.

    In the third round gradients are ten times as large as before.
    """
    ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    found = {}
    for name in RIVALS:
        average, job = averager(name, numel, group), LocalJob(ranks, numel, WIDTH)
        found[name] = list[float]()
        for number in range(rounds):
            scale = np.float32(10.0 if number == 2 else 1.0)
            data = [scale * np.random.default_rng([number, r]).standard_normal(numel, np.float32) for r in range(ranks)]
            buffer = torch.from_numpy(data[rank].copy())
            average(buffer)
            expected = np.mean(data, axis=0, dtype=np.float64)
            if name == "quantised":
                expected = job.step(number, data).outputs[rank].astype(np.float64)
            found[name].append(nmse(buffer.numpy(), expected))
    return found


def training(rank: int, name: str) -> tuple[float, float]:
    """How far parameters after three steps are from plain DDP's, relative, and how far those moved."""
    nets = [DistributedDataParallel(model(), bucket_cap_mb=0.05) for _ in range(2)]
    register_rival(nets[0], name)
    before = torch.cat([p.detach().flatten().clone() for p in nets[0].parameters()])
    for net in nets:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            data, target = batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(data), target).backward()
            optimizer.step()
    ours, plain = (torch.cat([p.detach().flatten() for p in net.parameters()]) for net in nets)
    moved = float((plain - before).norm())
    return float((ours - plain).norm()) / moved, moved
