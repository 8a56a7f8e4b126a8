"""One call that puts Tailbound under a DDP model."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tailbound.errors import ConfigError
from tailbound.torch.collectives import in_model, refuse_optimizer
from tailbound.torch.hook import allreduce_hook
from tailbound.torch.scaler import adopt
from tailbound.torch.state import TailboundState, model_digest

#: Name of the option that turns buffer broadcasts off: newer PyTorch has split it.
_SYNC_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def register(
    ddp_model: DistributedDataParallel,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> TailboundState:
    """Registers the hook on ``ddp_model`` and returns its state.

    Args:
        ddp_model: a DistributedDataParallel model, before its first step.
        optimizer: the optimizer that steps it; one that is not named is found at its first step.
        scaler: torch's gradient scaler, if one steps that optimizer: it becomes a ``tailbound.torch.GradScaler`` in its
            place, on all ranks. One that is not named is found at its first step.
        **options: of ``TailboundState``.

    Raises:
        ConfigError: not a DDP model, an invalid option, or an optimizer with collectives of its own.
        CapabilityError, AttachError, LayoutError, TransportError: before any training step.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise ConfigError(
            f"give register a torch.nn.parallel.DistributedDataParallel model, not {type(ddp_model).__name__}"
        )
    if optimizer is not None:
        refuse_optimizer(optimizer)
    barriers = in_model(ddp_model, _SYNC_OPTION)
    for barrier in barriers:
        warnings.warn(barrier.warning, stacklevel=2)
    state = TailboundState(ddp_model.process_group, model=model_digest(ddp_model.module), **options)
    try:
        if barriers and state.ranks > 1:
            state.together = barriers[0].refusal
        state.attach(ddp_model, optimizer)
        if scaler is not None:
            adopt(state, scaler)
        ddp_model.register_comm_hook(state, allreduce_hook)  # last: it cannot be taken back
    except BaseException:
        state.close()
        raise
    return state
