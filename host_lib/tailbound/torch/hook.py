"""The DDP communication hook.

No ``from __future__ import annotations`` here: DDP inspects the annotations as objects.
"""

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook as plain_hook

from tailbound.errors import ConfigError
from tailbound.torch.compat import GradBucket, in_backward
from tailbound.torch.state import TailboundState


def allreduce_hook(state: TailboundState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a gradient bucket over all ranks, in bounded time.

    Use it as ``ddp_model.register_comm_hook(TailboundState(), allreduce_hook)``, or call ``tailbound.torch.register``.
    The future completes with the average over those ranks whose contributions came in time (rows are corrected for
    the count), of the bucket's shape and type; DDP divides nothing after it.

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
    buffer, last = bucket.buffer(), bucket.is_last()
    if buffer.layout == torch.strided:
        state.layout.note(bucket)  # what is in a bucket is part of what ranks compare
    future = state.average(bucket.index(), buffer, last)  # refuses what is not supported
    if last and not in_backward():  # DDP averages zeros for this rank, which has no data left (``join``), nor steps
        state.note_missing(1)
    return future
