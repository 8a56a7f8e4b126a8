"""How a rank of a benchmark comes to the others: Gloo's process group, and a communicator on the same store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tailbound.collective.communicator import Communicator
from tailbound.settings.table import BALANCE, BITS, PORT, RESULT
from tailbound.transport.config import Config
from tailbound_lab.bench.start import StartLine


def store_of(rank: int, ranks: int, number: int = 0) -> TCPStore:
    """A store of ranks that need no process group; ``number`` is that of the job, where there are several."""
    return TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + number, ranks, rank == 0, timedelta(seconds=300),
        wait_for_workers=False,
    )  # fmt: skip


@contextmanager
def gathered(job: dict[str, Any]) -> Iterator[StartLine]:
    """Gloo's process group of all ranks of ``job``, and the line at which they start together."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    yield StartLine(Path(job["line"]), dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


@contextmanager
def communicator(
    job: dict[str, Any], name: str = "tailbound", on_thread: Callable[[], None] | None = None, /, **settings: Any
) -> Iterator[Communicator]:
    """A communicator on the group's store, with ``settings`` of ``Config``; all ranks leave together, measured."""
    config = Config(
        rank=dist.get_rank(),
        ranks=dist.get_world_size(),
        port=PORT.read(),
        result=RESULT.read(),
        bits=BITS.read(),
        balance=BALANCE.read(),
        **settings,
    )
    store = dist.distributed_c10d._get_default_store()
    with Communicator(store, config, datapath=job["datapath"], name=name, on_thread=on_thread) as ours:
        yield ours
        ours.meet("measured")


@contextmanager
def joined(job: dict[str, Any]) -> Iterator[tuple[Communicator, StartLine]]:
    """Both; ``known`` of ``job`` is what the ranks are told of their link's speed, bytes per second (0: nothing)."""
    with gathered(job) as line, communicator(job, rate=job.get("known", 0.0)) as ours:
        yield ours, line
