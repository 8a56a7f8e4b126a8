"""DistributedDataParallel over Tailbound: ``register`` is the one line that is needed.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py
    tailbound lab run --workers 2 --loss 0.01 -- python examples/train_ddp.py

On a cluster run torchrun on every host, with TAILBOUND_INTERFACE=eth0 for the network interface.
"""

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
    # Tailbound averages gradients only. Rendezvous, metrics and other exact values stay with this group.
    dist.init_process_group("gloo")
    sampler = DistributedSampler(data())
    loader = DataLoader(data(), batch_size=32, sampler=sampler)

    # A model with buffers (BatchNorm) needs forward_sync_buffers=False here (broadcast_buffers=False before PyTorch
    # 2.13). Otherwise DDP broadcasts them before every forward pass, and a slow rank holds all others. Running
    # statistics are then each rank's own, until state.synchronize().
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    # From here on gradients are averaged by Tailbound. Nothing has to be set: deadlines and rates are learned.
    state = tailbound.torch.register(net, optimizer=optimizer)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        # batches() lets a rank that was stopped apply the steps that the others have finished, or join them where they
        # are. Without it the rank stays behind. It may skip batches, so this loop has no collectives of its own.
        for points, labels in tailbound.torch.batches(loader, state):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(points), labels).backward()
            optimizer.step()
        with state.hold():  # the others wait for this rank, instead of going on without it
            right = accuracy(net.module)

    # A replica that missed results differs a little. Make all of them equal to the bit before the end.
    state.synchronize()
    stats = state.stats()
    print(
        f"rank {dist.get_rank()}: accuracy {right:.3f} over {stats['datapath']}, "
        f"{stats['delivered']:.2%} of the rows delivered"
    )
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
