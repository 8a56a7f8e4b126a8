"""Several ranks a host: the ranks of a host share every bucket, and each exchanges a part of it with other hosts.

    TAILBOUND_INTERFACE=eth0 torchrun --nnodes 2 --nproc-per-node 2 \\
        --rdzv-backend c10d --rdzv-endpoint host0:29500 examples/train_nodes.py
    torchrun --standalone --nproc-per-node 4 examples/train_nodes.py --per-host 2

The second line plays two hosts of two ranks each on one machine. With an interface for each rank of a host:
TAILBOUND_INTERFACE=eth0,eth1.
"""

import argparse
import os

import torch
import torch.distributed as dist
from task import accuracy, data, model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import tailbound.torch

EPOCHS = 2


def main() -> None:
    """Trains and says how well each replica does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--per-host", type=int, help="ranks on a host; default: as torchrun says")
    per_host = parser.parse_args().per_host
    dist.init_process_group("gloo")
    if per_host:  # one machine for several hosts: only then torchrun does not know
        os.environ |= {"LOCAL_WORLD_SIZE": str(per_host), "LOCAL_RANK": str(dist.get_rank() % per_host)}
    sampler = DistributedSampler(data())
    loader = DataLoader(data(), batch_size=32, sampler=sampler)
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    # "auto": the ranks that torchrun has started on this host. All hosts must have as many; where that cannot be,
    # an error says why.
    state = tailbound.torch.register(net, optimizer=optimizer, node_group="auto")

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(points), labels).backward()
            optimizer.step()
        with state.hold():
            right = accuracy(net.module)

    state.synchronize()
    stats = state.stats()
    where = f"over {stats['datapath']}, {stats['ranks']} hosts, {stats['delivered']:.2%} of the rows delivered"
    if stats["ranks"] == 1:
        where = "on 1 host, which sends nothing over a network"
    print(f"rank {dist.get_rank()}: accuracy {right:.3f} {where}")
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
