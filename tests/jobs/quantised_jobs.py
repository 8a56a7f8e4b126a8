"""What the processes of the tests of codes over TCP do; one function a job."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tailbound_lab.bench.figures import nmse
from tailbound_lab.bench.local_job import LocalJob
from tailbound_lab.bench.quantised import WIDTH, Quantised, register_quantised
from torch_jobs import model, passes


def means(rank: int) -> None:
    """Each round's mean is our codec's of one process, of an odd number of entries; the third grows tenfold."""
    ranks, group, numel = dist.get_world_size(), dist.group.WORLD, 50_001
    assert group is not None
    over_tcp, job = Quantised(numel, group), LocalJob(ranks, numel, WIDTH)
    for number in range(4):
        scale = np.float32(10.0 if number == 2 else 1.0)
        data = [scale * np.random.default_rng([number, r]).standard_normal(numel, np.float32) for r in range(ranks)]
        buffer = torch.from_numpy(data[rank].copy())
        over_tcp.mean(buffer)
        assert nmse(buffer.numpy(), job.step(number, data).outputs[rank].astype(np.float64)) == 0.0


def training(rank: int) -> None:
    """Parameters after three steps are near plain DDP's, by how far those moved."""
    nets = [DistributedDataParallel(model(), bucket_cap_mb=0.05) for _ in range(2)]
    register_quantised(nets[0])
    before = torch.cat([p.detach().flatten().clone() for p in nets[0].parameters()])
    for net in nets:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            passes([net], rank, step)
            optimizer.step()
    ours, plain = (torch.cat([p.detach().flatten() for p in net.parameters()]) for net in nets)
    moved = float((plain - before).norm())
    assert moved > 0
    assert float((ours - plain).norm()) / moved < 0.1
