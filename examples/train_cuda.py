"""DistributedDataParallel on CUDA devices, one for each rank: gradients are coded there, and averaged between hosts.

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST0:29400 examples/train_cuda.py
    torchrun --standalone --nproc-per-node 2 examples/train_cuda.py --device cpu    # the same loop without a GPU

docs/torch/large.md says what has been tried of the way of CUDA tensors.
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


def own_device(kind: str) -> torch.device:
    """The device of this rank: of its host's, the one that torchrun has numbered it by."""
    if kind == "cpu":
        return torch.device("cpu")
    local, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= found:
        raise SystemExit(
            f"local rank {local} has no CUDA device: {found} found. Start as many ranks a host as it has devices "
            "(--nproc-per-node), with a PyTorch that is built for CUDA; --device cpu tries the loop without one"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)  # before anything else, or every rank makes a context on device 0, too
    return device


def main() -> None:
    """Trains in bf16 and says how well each replica does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = own_device(parser.parse_args().device)

    # DDP's own broadcasts between devices are NCCL's. Tailbound uses the store for rendezvous, and UDP for gradients.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    sampler = DistributedSampler(data())
    loader = DataLoader(data(), batch_size=32, sampler=sampler, pin_memory=device.type == "cuda")

    # A model without buffers needs no forward_sync_buffers=False; see train_ddp.py.
    net = DistributedDataParallel(model().to(device), device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    state = tailbound.torch.register(net, optimizer=optimizer)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for points, labels in tailbound.torch.batches(loader, state):
            points, labels = points.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = nn.functional.cross_entropy(net(points), labels)
            loss.backward()  # averages are waited for by the device's stream; the host goes on
            optimizer.step()
        with state.hold():
            right = accuracy(lambda points: net.module(points.to(device)).cpu())

    state.synchronize()
    stats = state.stats()
    print(
        f"rank {dist.get_rank()}: accuracy {right:.3f} over {stats['datapath']}, "
        f"{stats['delivered']:.2%} of the rows delivered, coded by {stats.get('device_codec', 'the host')}"
    )
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
