"""One call that puts Tailbound under a DDP model."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tailbound.errors import ConfigError
from tailbound.torch.hook import allreduce_hook
from tailbound.torch.state import TailboundState, model_digest

#: Name of the option that turns buffer broadcasts off: newer PyTorch has split it.
_SYNC_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def register(
    ddp_model: DistributedDataParallel, *, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> TailboundState:
    """Registers the hook on ``ddp_model`` and returns its state.

    Args:
        ddp_model: a DistributedDataParallel model, before its first step.
        optimizer: the optimizer that steps it; one that is not named is found at its first step.
        **options: of ``TailboundState``.

    Raises:
        ConfigError: not a DDP model, or an option that cannot be.
        CapabilityError, AttachError, LayoutError, TransportError: before any training step.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise ConfigError(
            f"give register a torch.nn.parallel.DistributedDataParallel model, not {type(ddp_model).__name__}"
        )
    _warn_of_barriers(ddp_model)
    state = TailboundState(ddp_model.process_group, model=model_digest(ddp_model.module), **options)
    ddp_model.register_comm_hook(state, allreduce_hook)
    state.attach(ddp_model, optimizer)
    return state


def _warn_of_barriers(ddp_model: DistributedDataParallel) -> None:
    """DDP waits for all ranks in two places that no hook can bound; says so."""
    if ddp_model.broadcast_buffers and any(True for _ in ddp_model.module.buffers()):
        warnings.warn(
            "this model has buffers, and DDP broadcasts them before every forward pass, where a slow rank holds all "
            f"others; pass {_SYNC_OPTION}=False to DistributedDataParallel",
            stacklevel=3,
        )
    if ddp_model.find_unused_parameters:
        warnings.warn(
            "find_unused_parameters=True: DDP all-reduces a map of used parameters in every step, and a slow rank "
            "holds all others there; pass find_unused_parameters=False if every parameter gets a gradient",
            stacklevel=3,
        )
