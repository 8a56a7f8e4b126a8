"""Checkpoint and resume: run it again and it goes on after the last epoch saved, with as many ranks as you like.

    torchrun --standalone --nproc-per-node 2 examples/train_resume.py --epochs 1
    torchrun --standalone --nproc-per-node 3 examples/train_resume.py --epochs 2
    tailbound lab run --workers 2 -- python examples/train_resume.py

Every rank reads the file, so on a cluster it belongs on storage that all hosts share.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from task import accuracy, data, model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import tailbound.torch


def save(file: Path, epoch: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes a checkpoint of plain tensors, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    torch.save({"epoch": epoch, "model": net.state_dict(), "optimizer": optimizer.state_dict()}, part)
    os.replace(part, file)


def main() -> None:
    """Trains up to ``--epochs`` in all, counted over all runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=Path("out/resume.pt"))
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net, begin, saved = model(), 0, None
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        net.load_state_dict(saved["model"])
        begin = saved["epoch"]
        print(f"rank {rank}: resumed after epoch {begin} with accuracy {accuracy(net):.3f}")
    ddp = DistributedDataParallel(net)  # a model with buffers: see train_ddp.py
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])

    # A new job each time, with nothing to restore: scales, deadlines and rates are learned again in a few steps.
    state = tailbound.torch.register(ddp, optimizer=optimizer)
    sampler = DistributedSampler(data())
    loader = DataLoader(data(), batch_size=32, sampler=sampler)
    for epoch in range(begin, options.epochs):
        sampler.set_epoch(epoch)
        for points, labels in tailbound.torch.batches(loader, state):
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(points), labels).backward()
            optimizer.step()
        # On every rank, after the same step: one that has missed results takes parameters and moments of one that has
        # not, so that what is saved is what all have. Where nothing was lost it compares digests, and no more.
        if not state.synchronize():
            print(f"rank {rank}: could not be synchronized after epoch {epoch + 1}")
        if rank == 0:
            with state.hold():  # for as long as this takes (up to a minute) the others wait, instead of going on alone
                save(options.checkpoint, epoch + 1, net, optimizer)

    print(f"rank {rank}: accuracy {accuracy(net):.3f} after epoch {options.epochs}")
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
