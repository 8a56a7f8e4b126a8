"""What the processes of the tests of Lightning and Accelerate do: fp16 with the scaler that the framework makes."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from resync_jobs import state_digest
from tailbound.torch import GradScaler, register
from torch_jobs import batch, model, patient

#: Ranks whose gradients overflow, by step: all, one, none.
ILL: list[tuple[int, ...]] = [(), (0, 1), (), (1,), (), ()]
SCALE = 2.0**10


def as_torchrun(rank: int) -> None:
    """The variables that both frameworks look for."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test"}


def loss_of(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    data, target = batch(rank, step)
    loss = nn.functional.cross_entropy(net(data).float(), target)
    return loss * (float("inf") if rank in ILL[step] else 1.0)


def told(scales: list[float], moved: list[bool], digests: list[str]) -> dict[str, Any]:
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, digests)
    return {"scales": scales, "moved": moved, "alike": everyone[0] == everyone[1]}


def lightning(rank: int, say: bool) -> dict[str, Any]:
    """Lightning's ``MixedPrecision`` plugin, which holds the scaler; it unscales before it steps."""
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.precision import MixedPrecision
    from pytorch_lightning.strategies import DDPStrategy

    as_torchrun(rank)
    scales, moved, digests = list[float](), list[bool](), list[str]()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, _: Any, index: int) -> torch.Tensor:
            return loss_of(self.net, rank, index)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    class Tailbound(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            scaler = trainer.precision_plugin.scaler if say else None
            self.state = register(
                trainer.strategy.model, optimizer=trainer.optimizers[0], scaler=scaler, **patient(resync_period=0)
            )

        def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            self.before = state_digest(module.net, trainer.optimizers[0])

        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            digests.append(state_digest(module.net, trainer.optimizers[0]))
            moved.append(digests[-1] != self.before)
            scales.append(trainer.precision_plugin.scaler.get_scale())
            assert type(trainer.precision_plugin.scaler) is GradScaler

        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            self.state.close()

    # precision="16-mixed" makes such a plugin on a GPU
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", SCALE, growth_interval=100))
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[plugin], gradient_clip_val=1.0, use_distributed_sampler=False, callbacks=[Tailbound()], **quiet,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(range(len(ILL))))
    return told(scales, moved, digests)


def accelerate(rank: int, say: bool) -> dict[str, Any]:
    """Accelerate's wrapper of the optimizer, which holds the scaler and says whether a step was skipped."""
    from accelerate import Accelerator

    as_torchrun(rank)
    accelerator = Accelerator(cpu=True)
    # mixed_precision="fp16" makes one on a GPU, of GradScalerKwargs
    accelerator.scaler = torch.amp.GradScaler("cpu", SCALE, growth_interval=100)
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 1e-3))
    scaler = accelerator.scaler if say else None
    scales, moved, digests = list[float](), list[bool](), list[str]()
    with register(net, optimizer=optimizer.optimizer, scaler=scaler, **patient(resync_period=0)):
        for step in range(len(ILL)):
            before = state_digest(net, optimizer.optimizer)
            optimizer.zero_grad()
            accelerator.backward(loss_of(net, rank, step))
            accelerator.scaler.unscale_(optimizer.optimizer)  # as accelerator.clip_grad_norm_ does on a GPU
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            digests.append(state_digest(net, optimizer.optimizer))
            moved.append(digests[-1] != before)
            scales.append(accelerator.scaler.get_scale())
            assert optimizer.step_was_skipped != moved[-1]
        assert type(accelerator.scaler) is GradScaler
    return told(scales, moved, digests)
