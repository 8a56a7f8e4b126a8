"""Rivals as DDP hooks.

No ``from __future__ import annotations`` here: DDP inspects the annotations as objects.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from tailbound_lab.bench.rivals.choose import Averager, averager

#: Buckets on their way at the same time, each with connections of its own, as Gloo's all-reduces have threads.
_LANES = 2


def register_rival(model: DistributedDataParallel, name: str, straggler: int | None = None) -> None:
    """Lets the rival ``name`` average the gradients of ``model``, float32, beside the backward pass.

    Args:
        model: of the default group.
        name: of ``RIVALS``.
        straggler: whom StragglAR expects to be late; None: the last rank.
    """
    lanes = []
    for _ in range(_LANES):
        group = dist.new_group()
        assert group is not None
        lanes.append((group, ThreadPoolExecutor(1, thread_name_prefix=name)))
    made: dict[tuple[int, int], Averager] = {}

    def hook(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        index, buffer = bucket.index(), bucket.buffer()  # DDP hands over buckets in the same order on all ranks
        group, thread = lanes[index % _LANES]
        key = index, buffer.numel()
        if key not in made:
            made[key] = averager(name, buffer.numel(), group, straggler)
        average = made[key]
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        host = buffer.cpu()  # the buffer itself, if it is there; else on the stream of this thread

        def work() -> None:
            try:
                average(host)
                if host is not buffer:
                    buffer.copy_(host)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(buffer)

        thread.submit(work)
        return future

    model.register_comm_hook(None, hook)
