"""Lightning over Tailbound: ``Trainer(strategy="ddp", callbacks=[TailboundCallback()])``.

``DDPStrategy(ddp_comm_state=..., ddp_comm_hook=...)`` does not serve: Lightning passes them on for CUDA only, and makes
the process group later than such a state.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import MethodType
from typing import Any

from tailbound.integrations.training import Training

#: Lightning is in two packages, and a Trainer of one does not take a callback of the other.
_OTHER = "lightning.pytorch" in sys.modules or find_spec("pytorch_lightning") is None
_NAME = "lightning.pytorch" if _OTHER else "pytorch_lightning"
_pl: Any = importlib.import_module(_NAME)

#: What DDP calls the option by which it broadcasts buffers: newer PyTorch has renamed it.
_BUFFERS = {"forward_sync_buffers", "broadcast_buffers"}


class TailboundCallback(Training, _pl.Callback):  # type: ignore[misc]
    """Averages gradients by Tailbound from the first step on; put it among a Trainer's ``callbacks``.

    It sets what would hold all ranks in every step, as far as the strategy leaves that open, and warns of the rest. The
    ranks hold while they validate and save. They are made equal before that and at the end: within two minutes, and a
    rank that does not come is waited for one.

    Args:
        **options: of ``tailbound.torch.register``.

    Raises:
        ConfigError: the job is elastic; from ``fit``: DDP does not wrap the model, or the model cannot be registered.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__("Lightning's Trainer", options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """DDP and the optimizers are there, and no step has been made."""
        if trainer.world_size == 1:
            return
        loop, strategy = trainer.fit_loop.epoch_loop, trainer.strategy
        if hasattr(loop, "_broadcast_sigterm_tensor"):
            loop._broadcast_sigterm_tensor = MethodType(_look_for_sigterm, loop)
            self.has_set("rank 0 broadcasts no SIGTERM before every batch: each rank sees its own")
        schedulers = {f"scheduler {n}": config.scheduler for n, config in enumerate(trainer.lr_scheduler_configs)}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        buffers = bool(_BUFFERS & getattr(strategy, "_ddp_kwargs", {}).keys())
        self.begin(strategy.model, trainer.optimizers[0], scaler, schedulers, 'pass strategy="ddp"', buffers)
        trainer.save_checkpoint = self.held(trainer.save_checkpoint, equal=True)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch begins."""
        self.resume()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After the first batch it is known what is logged in every step."""
        if self.state is None:
            return
        self.state.boundary()  # other callbacks may wait for all ranks next
        if batch_idx == trainer.current_epoch == 0:
            for metric in (trainer._results or {}).values():
                if metric.meta.on_step and metric.meta.sync.should:
                    self.warn(f"self.log({metric.meta.name!r}, sync_dist=True): pass on_step=False")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Metrics of the epoch are reduced next, and checkpoints saved."""
        self.pause()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Before the first step, Lightning tries a validation: there is no state yet."""
        self.pause(equal=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last step is over."""
        self.end()
        vars(trainer).pop("save_checkpoint", None)


def _look_for_sigterm(loop: Any) -> None:
    """In place of a broadcast in every step, in which rank 0 tells the others of SIGTERM."""
    if loop.trainer.received_sigterm:
        raise importlib.import_module(f"{_NAME}.utilities.exceptions").SIGTERMException
