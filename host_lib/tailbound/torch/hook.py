"""The DDP communication hook.

No ``from __future__ import annotations`` here: DDP inspects the annotations as objects.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook as plain_hook

from tailbound.errors import ConfigError
from tailbound.torch.compat import GradBucket, backward_pass
from tailbound.torch.state import TailboundState


def allreduce_hook(state: TailboundState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a gradient bucket over all ranks, in bounded time.

    Use it as ``ddp_model.register_comm_hook(TailboundState(), allreduce_hook)``, or call ``tailbound.torch.register``.
    The future completes with the average over those ranks whose contributions came in time, of the bucket's shape and
    type; DDP divides nothing after it. Sparse buckets are averaged by the process group.

    Raises:
        ConfigError: a bucket of a type, layout or device that is not supported, or no bucket at all.
        LayoutError: ranks disagree on the bucket layout.
        TransportError: the transport has ended.
    """
    if not isinstance(bucket, GradBucket):
        raise ConfigError(
            f"the hook got a {type(bucket).__name__} instead of a GradBucket: torch.compile with "
            'optimize_ddp="python_reducer" is not supported; use torch._dynamo.config.optimize_ddp = "ddp_optimizer"'
        )
    if state.detached:
        return plain_hook(state.everyone, bucket)
    buffer = bucket.buffer()
    index, last = bucket.index(), bucket.is_last()
    if buffer.layout == torch.sparse_coo:
        future = _average_sparse(state, index, buffer, last)
    else:
        state.layout.note(bucket)  # what is in a bucket is part of what ranks compare
        future = state.average(index, buffer, last)  # refuses what is not supported
    if last and backward_pass() < 0:  # DDP averages zeros for this rank, which has no data left (``join``), nor steps
        state.note_missing(1)
    return future


def _average_sparse(
    state: TailboundState, index: int, tensor: torch.Tensor, last: bool
) -> torch.futures.Future[torch.Tensor]:
    """Averages a sparse gradient exactly over all ranks of the process group, however long that takes.

    Ranks have different rows of an embedding, so that no common layout can be coded. A step ends with an op of
    Tailbound: where its last bucket is sparse, that is an empty one's.
    """
    state.complain(
        "a bucket is sparse: it is averaged by the process group, where a slow rank holds all others; "
        "give the embedding sparse=False to bound its time"
    )
    state.layout.note_sparse(last=last)
    if index == 0 and not last:  # the op that ends a step begins it, too
        state.before_backward()
    scale = state.loss_scale
    group = state.everyone
    work = dist.all_reduce(tensor / (scale * dist.get_world_size(group)), group=group, async_op=True)
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0] * scale)
    if not last:
        return averaged
    ended = state.average(index, torch.zeros(0, device=tensor.device), True)

    def result(both: torch.futures.Future[list[torch.futures.Future[torch.Tensor]]]) -> torch.Tensor:
        for part in both.value():
            part.wait()  # raises what went wrong
        return both.value()[0].value()

    return torch.futures.collect_all([averaged, ended]).then(result)
