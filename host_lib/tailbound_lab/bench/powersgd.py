"""torch's PowerSGD hook over Gloo, with several buckets in flight.

``powerSGD_hook`` starts its second and third all-reduce of a bucket in callbacks, whenever the one before is over. Gloo
tells collectives of one group apart by the order in which they start, and that order then differs between ranks:
processes abort ("Received data size doesn't match expected size") or average what does not belong together. Within one
bucket the order is the same everywhere, so each bucket has a group of its own here, and buckets still overlap.

No ``from __future__ import annotations`` here: DDP inspects the annotations as objects.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

#: Rank of the approximations.
RANK = 4
#: PowerSGD keeps errors and bases by bucket, and DDP makes its buckets anew after the first step: torch asks for 2.
FIRST = 2


def register_powersgd(model: DistributedDataParallel, start: int = FIRST) -> PowerSGDState:
    """Puts PowerSGD of rank 4 under ``model`` (Vogels et al., NeurIPS 2019), compressing after ``start`` steps."""
    state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=max(FIRST, start))
    groups: dict[int, dist.ProcessGroup | None] = {}

    def hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        index = bucket.index()
        if index not in groups:  # at the same bucket on all ranks
            groups[index] = dist.new_group()
        state.process_group = groups[index]
        return powerSGD_hook(state, bucket)

    model.register_comm_hook(state, hook)
    return state
