"""How a rank of a benchmark comes to the others: Gloo's process group, and a communicator on the same store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tailbound.bench.start import StartLine
from tailbound.collective.communicator import Communicator
from tailbound.transport.config import Config
from tailbound.transport.settings import PORT, RESULT


@contextmanager
def joined(job: dict[str, Any]) -> Iterator[tuple[Communicator, StartLine]]:
    """The communicator and the start line of this rank of ``job``; all ranks leave together when nobody measures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = Config(rank=rank, ranks=ranks, port=PORT.read(), result=RESULT.read())
    line = StartLine(Path(job["line"]), rank, ranks)
    store = dist.distributed_c10d._get_default_store()
    with Communicator(store, config, datapath=job["datapath"]) as ours:
        yield ours, line
        ours.meet("measured")
    dist.destroy_process_group()
