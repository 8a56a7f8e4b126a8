"""Buckets of sparse gradients: exact, through the process group.

What ranks have of an embedding's rows has no common layout that could be coded, so these buckets take the way that
DDP's own do. There a slow rank holds all others, which is said once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tailbound.torch.state import TailboundState

#: Entries of the bucket that ends a step in place of a sparse one.
_END = 64


def average_sparse(
    state: TailboundState, index: int, tensor: torch.Tensor, last: bool
) -> torch.futures.Future[torch.Tensor]:
    """Averages a sparse gradient exactly over all ranks of the process group, however long that takes.

    A step ends with an op of Tailbound: where its last bucket is sparse, that is one of zeros.
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

    def scaled(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return done.value()[0] * scale

    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(scaled)
    if not last:
        return averaged
    ended = state.average(index, torch.zeros(_END, device=tensor.device), True)

    def result(both: torch.futures.Future[list[torch.futures.Future[torch.Tensor]]]) -> torch.Tensor:
        for part in both.value():
            part.wait()  # raises what went wrong
        return both.value()[0].value()

    return torch.futures.collect_all([averaged, ended]).then(result)
