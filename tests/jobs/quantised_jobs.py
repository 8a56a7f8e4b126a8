"""What the processes of the tests of codes over TCP do; one function a job."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tailbound_lab.bench.figures import nmse
from tailbound_lab.bench.local_job import LocalJob
from tailbound_lab.bench.quantised import WIDTH, Quantised, register_quantised
from torch_jobs import batch, model


def means(rank: int, numel: int, rounds: int) -> list[float]:
    """Error of each round's mean against our codec's of one process; the third has gradients ten times as large."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    over_tcp, job = Quantised(numel, group), LocalJob(ranks, numel, WIDTH)
    found = []
    for number in range(rounds):
        scale = np.float32(10.0 if number == 2 else 1.0)
        data = [scale * np.random.default_rng([number, r]).standard_normal(numel, np.float32) for r in range(ranks)]
        buffer = torch.from_numpy(data[rank].copy())
        over_tcp.mean(buffer)
        found.append(nmse(buffer.numpy(), job.step(number, data).outputs[rank].astype(np.float64)))
    return found


def training(rank: int) -> tuple[float, float]:
    """How far parameters after three steps are from plain DDP's, relative, and how far those moved."""
    nets = [DistributedDataParallel(model(), bucket_cap_mb=0.05) for _ in range(2)]
    register_quantised(nets[0])
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
