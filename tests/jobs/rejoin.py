"""A program whose rank 1 kills itself once and comes back; it says what its return took."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tailbound.torch
from elastic_jobs import Count

WIDTH, LAYERS, VICTIM = 1024, 4, 1


def main(mark: Path) -> None:
    """Trains until the victim has been back for a while; ``mark`` tells its second life from its first."""
    tailbound.torch.elastic.init_process_group()
    rank, count, inside = dist.get_rank(), Count(), 0
    torch.set_num_threads(1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    net = DDP(nn.Sequential(*layers), process_group=tailbound.torch.elastic.alone())
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
    with tailbound.torch.register(net, optimizer=optimizer, also={"count": count}) as state:
        came_back = state.outside
        until = float("inf")
        while count.steps < until:
            begun, outside = time.monotonic(), state.outside
            state.boundary()
            if outside and not state.outside:
                taken = state.stats()["replica"]["counters"]["bytes_taken"]
                print(f"back: {taken} bytes, {time.monotonic() - begun:.3f} s")
                mark.with_suffix(".back").write_text(str(count.steps + 5))
            if mark.with_suffix(".back").exists():
                until = int(mark.with_suffix(".back").read_text() or "0") or until
            optimizer.zero_grad()
            net(torch.randn(2, WIDTH)).square().mean().backward()
            optimizer.step()
            count.steps += 1
            inside += not state.outside
            if rank == VICTIM and inside == 10 and not came_back:
                os.kill(os.getpid(), signal.SIGKILL)
        print(f"equal: {state.synchronise(60)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
