"""Ranks that die come back: kill one (kill -9) and watch. Its agent starts it again, and the others go on meanwhile.

One torchrun for each rank, with the static rendezvous: it restarts its own process and leaves the others alone. Rank
0's has the store, so it has to live; rank 0 itself may die like any other. More: docs/torch/failures.md.

    for rank in 0 1 2 3; do
        torchrun --rdzv-backend static --master-addr 127.0.0.1 --master-port 29500 --max-restarts 3 \
            --nnodes 4 --node-rank $rank --nproc-per-node 1 examples/train_elastic.py &
    done; wait
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from task import accuracy, data, model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tailbound.torch

BATCH = 32


class Place:
    """Where training stands in the data; a rank that comes back takes it from the others."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        """For ``extra_state`` and for checkpoints."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The other way."""
        self.step = state["step"]


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, ...]:
    """This rank's part of the data of a step, by the number of the step alone."""
    points, labels = data().tensors
    per_epoch = len(points) // (BATCH * ranks)
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(step // per_epoch))
    chosen = order.view(-1, BATCH)[(step % per_epoch) * ranks + rank]
    return points[chosen], labels[chosen]


def main() -> None:
    """Trains for ``--steps`` steps; every rank prints the accuracy of its replica at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--checkpoint", type=Path, default=Path("out/elastic.pt"))
    parser.add_argument(
        "--pause", type=float, default=0.02, help="seconds that each step takes longer, to kill ranks in"
    )
    options = parser.parse_args()

    tailbound.torch.elastic.init_process_group()  # in place of dist.init_process_group
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(model(), process_group=tailbound.torch.elastic.alone())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.steps)
    place = Place()
    kept = {"model": ddp.module, "optimizer": optimizer, "scheduler": scheduler, "place": place}
    # For when all have died: every rank loads it, since rank 0 hands on model and optimizer only. A rank that comes
    # back alone takes what the others hold now.
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        for name, part in kept.items():
            part.load_state_dict(saved[name])
    extra_state = {"scheduler": scheduler, "place": place}
    state = tailbound.torch.register(ddp, optimizer=optimizer, extra_state=extra_state)
    print(f"rank {rank}: pid {os.getpid()}, {'has come back' if state.outside else f'begins at step {place.step}'}")

    while place.step < options.steps:
        if state.outside:
            state.boundary()  # it may come in here, and then goes on at the others' place in the data
        points, labels = batch(place.step, rank, ranks)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(points), labels).backward()
        optimizer.step()
        scheduler.step()
        place.step += 1
        time.sleep(options.pause)
        if place.step % 100 == 0 and not state.outside:
            well = state.synchronize()
            if rank == 0 and well:
                with state.hold():
                    part = options.checkpoint.with_suffix(".part")
                    part.parent.mkdir(parents=True, exist_ok=True)
                    torch.save({name: one.state_dict() for name, one in kept.items()}, part)
                    os.replace(part, options.checkpoint)
            print(f"rank {rank}: step {place.step}, {'all are equal' if well else 'could not be synchronized'}")

    print(f"rank {rank}: accuracy {accuracy(ddp.module):.3f} after step {place.step}")
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
