"""Lightning over Tailbound: ``Trainer(strategy="ddp", callbacks=[TailboundCallback()])``.

``DDPStrategy(ddp_comm_state=..., ddp_comm_hook=...)`` does not serve: Lightning passes them on for CUDA only, and makes
the process group later than such a state.
"""

from __future__ import annotations

import importlib
import sys
from types import MethodType
from typing import Any

from tailbound.integrations.training import Training
from tailbound.torch import TailboundState

#: Lightning is in two packages. A Trainer of one does not take a callback of the other.
_PACKAGES = sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules)

#: What DDP calls the option by which it broadcasts buffers: newer PyTorch has renamed it.
_BUFFERS = {"forward_sync_buffers", "broadcast_buffers"}


def _lightning() -> Any:
    for name in _PACKAGES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reason = error
    raise ImportError("tailbound.integrations.lightning needs Lightning: pip install pytorch-lightning") from reason


_pl = _lightning()


class TailboundCallback(_pl.Callback):  # type: ignore[misc, name-defined]
    """Averages gradients by Tailbound from the first step on; put it among a Trainer's ``callbacks``.

    It sets what would hold all ranks in every step, as far as the strategy leaves that open, and warns of the rest. The
    ranks hold while they validate and save, and are made equal before that and at the end.

    Args:
        **options: of ``tailbound.torch.register``.

    Raises:
        ConfigError: the job is elastic; from ``fit``: DDP does not wrap the model, or the model cannot be registered.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._training = Training("Lightning's Trainer", "broadcast, all_reduce and barrier", options)

    @property
    def state(self) -> TailboundState | None:
        """Of the model, once training has begun; it keeps its ``stats()`` when training has ended."""
        return self._training.state

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """DDP and the optimizers are there, and no step has been made."""
        if trainer.world_size == 1:
            return
        training, loop = self._training, trainer.fit_loop.epoch_loop
        schedulers = {f"scheduler {n}": config.scheduler for n, config in enumerate(trainer.lr_scheduler_configs)}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        training.buffers_open = not _BUFFERS & getattr(trainer.strategy, "_ddp_kwargs", {}).keys()
        training.begin(trainer.strategy.model, trainer.optimizers[0], scaler, schedulers, 'pass strategy="ddp"')
        if hasattr(loop, "_broadcast_sigterm_tensor"):
            loop._broadcast_sigterm_tensor = MethodType(_look_for_sigterm, loop)
            training.done.append("rank 0 broadcasts no SIGTERM before every batch: each rank sees its own")
        trainer.save_checkpoint = training.held(trainer.save_checkpoint, equal=True)
        training.report()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch begins."""
        self._training.resume()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After the first batch it is known what is logged in every step."""
        if self.state is None:
            return
        self.state.boundary()  # other callbacks may wait for all ranks next
        if batch_idx == trainer.current_epoch == 0:
            metas = [metric.meta for metric in (trainer._results or {}).values()]
            names = sorted({meta.name for meta in metas if meta.on_step and meta.sync.should})
            self._training.left += [f"self.log({name!r}, sync_dist=True): pass on_step=False" for name in names]
            self._training.report()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Metrics of the epoch are reduced next, and checkpoints saved."""
        self._training.pause()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Before the first step, Lightning tries a validation: there is no state yet."""
        self._training.pause(equal=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last step is over."""
        self._training.end()
        vars(trainer).pop("save_checkpoint", None)


def _look_for_sigterm(loop: Any) -> None:
    """In place of a broadcast in every step, in which rank 0 tells the others of SIGTERM."""
    if getattr(loop.trainer, "received_sigterm", False):
        raise importlib.import_module(f"{_pl.__name__}.utilities.exceptions").SIGTERMException
