"""What a training step waits for all ranks in, beside the averages: found before the first step.

Such a collective only stalls while every rank makes each of them. A rank that skips a step (``batches``) makes one
less, and the others wait for it for good, or pair it with one of another step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tailbound.errors import ConfigError

#: Optimizers whose ``step()`` is a collective; by name, since importing them costs and warns.
_OPTIMIZERS = {
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": "shards its state over the ranks and "
    "broadcasts parameters in every step, so no step is bounded, and a rank's state cannot be made equal to another's: "
    "give every rank a plain optimizer, or shard inside a host by FSDP2 (tailbound.torch.fsdp)",
    "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer": "averages parameters over the ranks in "
    "step(), where one that skips a step would hold all others: give the optimizer inside it",
}


def in_model(ddp_model: DistributedDataParallel, sync_option: str) -> Iterator[tuple[str, str]]:
    """What DDP and the model wait for in every pass, and what to do; ``sync_option`` is that of buffers' broadcasts."""
    if any(_waits(module) for module in ddp_model.modules()):
        what = (
            "this model has SyncBatchNorm, which exchanges statistics with all ranks in every forward and backward "
            "pass, where a slow rank holds all others"
        )
        yield what, "use BatchNorm or GroupNorm instead"
    if ddp_model.broadcast_buffers and any(True for _ in ddp_model.module.buffers()):
        what = (
            "this model has buffers, and DDP broadcasts them before every forward pass, where a slow rank holds all "
            "others"
        )
        cure = (
            f"pass {sync_option}=False to DistributedDataParallel; running statistics are then each rank's own, until "
            "state.synchronize() makes them equal: call it before you evaluate or save"
        )
        yield what, cure
    if ddp_model.find_unused_parameters:
        what = (
            "find_unused_parameters=True: DDP all-reduces a map of used parameters in every step, and a slow rank "
            "holds all others there"
        )
        yield what, "pass find_unused_parameters=False if every parameter gets a gradient"


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose ``step()`` is a collective, or makes other passes on each rank.

    Raises:
        ConfigError: it is one; the message says what to take instead.
    """
    if isinstance(optimizer, torch.optim.LBFGS) and any(
        group["max_iter"] > 1 or group["line_search_fn"] for group in optimizer.param_groups
    ):
        raise ConfigError(
            "LBFGS decides by each rank's own loss how many backward passes a step has, and ranks would average "
            "different ones: give it max_iter=1 and no line_search_fn"
        )
    for kind in type(optimizer).__mro__:
        why = _OPTIMIZERS.get(f"{kind.__module__}.{kind.__qualname__}")
        if why is not None:
            raise ConfigError(f"{kind.__name__} {why}")


def _waits(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.SyncBatchNorm) and dist.get_world_size(module.process_group) > 1
