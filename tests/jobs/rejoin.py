"""A program whose rank 1 kills itself once and comes back; it says what its return took, from the kill on.

Times are of the machine's clock since it was started, which a process shares with the one before it.
"""

from __future__ import annotations

import itertools
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


def now() -> float:
    """Seconds since the machine was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_begun() -> float:
    """When the kernel made this process, on the same clock (proc(5): field 22, in ticks)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def main(mark: Path) -> None:
    """Trains until the victim has been back for a while; ``mark`` tells its second life from its first."""
    started = now()
    tailbound.torch.elastic.init_process_group()
    rank, count, inside = dist.get_rank(), Count(), 0
    torch.set_num_threads(1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    net = DDP(nn.Sequential(*layers), process_group=tailbound.torch.elastic.alone())
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
    with tailbound.torch.register(net, optimizer=optimizer, also={"count": count}) as state:
        came_back, registered = state.outside, now()
        until = float("inf")
        while count.steps < until:
            begun, outside = now(), state.outside
            state.boundary()
            if outside and not state.outside:
                taken = state.stats()["replica"]["counters"]["bytes_taken"]
                parts = float(mark.read_text()), process_begun(), started, registered, begun, now()
                seconds = [f"{after - before:.3f}" for before, after in itertools.pairwise(parts)]
                print(f"back: {taken} bytes, {' '.join(seconds)} s")
                mark.with_suffix(".back").write_text(str(count.steps + 5))
            if mark.with_suffix(".back").exists():
                until = int(mark.with_suffix(".back").read_text() or "0") or until
            optimizer.zero_grad()
            net(torch.randn(2, WIDTH)).square().mean().backward()
            optimizer.step()
            count.steps += 1
            inside += not state.outside
            if rank == VICTIM and inside == 10 and not came_back:
                mark.write_text(str(now()))
                os.kill(os.getpid(), signal.SIGKILL)
        print(f"equal: {state.synchronise(60)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
