"""Accelerate over Tailbound: ``state = register(accelerator, net, optimizer)`` after ``accelerator.prepare``."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from tailbound.integrations.training import Training
from tailbound.torch import TailboundState

#: Methods of an Accelerator that wait for all ranks.
_COLLECTIVES = ("gather", "gather_for_metrics", "reduce", "pad_across_processes", "wait_for_everyone", "save_state")


def register(accelerator: Accelerator, model: Any, optimizer: Any, **options: Any) -> TailboundState:
    """Averages the gradients of ``model`` by Tailbound, both as ``accelerator.prepare`` returned them.

    From here on the rank holds within the accelerator's collectives. ``save_state`` makes the replicas equal first, and
    ``end_training`` does so and closes the state: within two minutes, and a rank that does not come is waited for one.
    DDP no longer broadcasts buffers.

    Args:
        accelerator: whose ``scaler`` and schedulers, if there are any, are kept equal with the model.
        model: a DistributedDataParallel model, also a compiled one.
        optimizer: the optimizer that steps it.
        **options: of ``tailbound.torch.register``.

    Raises:
        ConfigError: DDP does not wrap ``model``, or it cannot be registered, or the job is elastic.
    """
    training = Training("Accelerate", options)
    if any("Dispatcher" in type(loader).__name__ for loader in accelerator._dataloaders):
        training.warn("rank 0 sends every batch to all: pass DataLoaderConfiguration(dispatch_batches=False)")
    schedulers = {f"scheduler {number}": scheduler for number, scheduler in enumerate(accelerator._schedulers)}
    remedy = "start one process for each device by accelerate launch or torchrun, without FSDP and DeepSpeed"
    state = training.begin(model, optimizer, accelerator.scaler, schedulers, remedy, buffers=False)
    before = accelerator.end_training  # it may be that of another model

    def end_training() -> None:
        training.end()
        before()

    for name in _COLLECTIVES:
        setattr(accelerator, name, training.held(getattr(accelerator, name), equal=name == "save_state"))
    accelerator.end_training = end_training
    return state
