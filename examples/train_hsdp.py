"""HSDP over Tailbound: FSDP2 shards a model over the ranks of a host, Tailbound averages between hosts.

    torchrun --standalone --nproc-per-node 4 examples/train_hsdp.py --shards 2
    tailbound lab run --workers 2 -- python examples/train_hsdp.py

On a cluster the ranks of a host hold the shards of one replica. The slow network between hosts carries one shard of the
gradients a rank.
"""

import argparse
import os

import torch
import torch.distributed as dist
from task import accuracy, data, model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import tailbound.torch.fsdp

EPOCHS = 2


def main() -> None:
    """Trains and says how well each rank's replica does."""
    dist.init_process_group("gloo")
    ranks, on_this_host = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=on_this_host if on_this_host < ranks else 1)
    shards = parser.parse_args().shards

    sampler = DistributedSampler(data())
    loader = DataLoader(data(), batch_size=32, sampler=sampler)

    # fully_shard gets the shard dimension only. Given both, FSDP would average over the replicas by itself.
    mesh = init_device_mesh("cpu", (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)  # after fully_shard: it steps the shards

    # Each rank averages its shard with those that hold the same one on other hosts; parameters are made equal here.
    state = tailbound.torch.fsdp.register(net, mesh["replicate"], optimizer=optimizer)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(points), labels).backward()
            optimizer.step()
        with state.hold():
            right = accuracy(net)  # gathers parameters: all ranks of a host have to call it

    state.synchronize()
    stats = state.stats()  # empty where there is one rank only
    print(
        f"rank {dist.get_rank()}: accuracy {right:.3f} over {stats['datapath']}, {shards} shards, "
        f"{stats['delivered']:.2%} of the rows delivered"
    )
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
