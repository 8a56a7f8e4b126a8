"""DistributedDataParallel over Tailbound: ``register`` is the one line that is needed.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py
    tailbound lab run --workers 2 --loss 0.01 -- python examples/train_ddp.py

On a cluster: torchrun on every host as ever, with TAILBOUND_INTERFACE=eth0 for the network interface to use.
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
    # Tailbound takes gradients only: rendezvous, metrics and whatever else must be exact stay with this group.
    dist.init_process_group("gloo")
    sampler = DistributedSampler(data())
    loader = DataLoader(data(), batch_size=32, sampler=sampler)

    # A model with buffers (BatchNorm's, say) wants forward_sync_buffers=False here (before PyTorch 2.13:
    # broadcast_buffers=False). DDP else broadcasts them before every forward pass, and there a slow rank holds all
    # others. Running statistics are then each rank's own, until state.synchronise().
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    # From here on gradients are averaged by Tailbound. Nothing has to be set: deadlines and rates are learned.
    state = tailbound.torch.register(net, optimizer=optimizer)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        # batches() is optional: a rank that was stopped for long then applies what the others have finished, or joins
        # them where they are, instead of staying behind for good. It may skip batches: no collectives in this loop.
        for points, labels in tailbound.torch.batches(loader, state):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(points), labels).backward()
            optimizer.step()
        with state.hold():  # the others wait for this rank meanwhile, instead of going on without it
            right = accuracy(net.module)

    # A replica that has missed results differs a little. Before the end, make all of them equal to the bit.
    state.synchronise()
    stats = state.stats()
    print(
        f"rank {dist.get_rank()}: accuracy {right:.3f} over {stats['datapath']}, "
        f"{stats['delivered']:.2%} of the rows delivered"
    )
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
