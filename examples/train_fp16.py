"""Half precision with torch's own gradient scaler: autocast to float16, and a loss scale for each rank.

    torchrun --standalone --nproc-per-node 2 examples/train_fp16.py

A rank gets averages, which are finite where its own gradient was not, so that its scaler alone could not tell.
``register`` makes it one that sees the rank's own overflows (docs/torch/options.md, "Loss scale"); the loop stays.
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
    """Trains and says how well each replica does, and at which scale."""
    dist.init_process_group("gloo")
    sampler = DistributedSampler(data())
    loader = DataLoader(data(), batch_size=32, sampler=sampler)
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    # Far too large, so that the first steps overflow and are left out: watch it come down.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    state = tailbound.torch.register(net, optimizer=optimizer, scaler=scaler)

    lowered = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(net(points), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # before clipping: ranks may have other scales
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            scaler.step(optimizer)  # leaves the step out where all ranks overflowed
            before = scaler.get_scale()
            scaler.update()
            lowered += scaler.get_scale() < before

    state.synchronize()
    stats = state.stats()  # empty where there is one rank only
    print(
        f"rank {dist.get_rank()}: accuracy {accuracy(net.module):.3f} over {stats['datapath']}, "
        f"{stats['delivered']:.2%} of the rows delivered; "
        f"scale {scaler.get_scale():g}, lowered {lowered} times"
    )
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
