"""What the processes of the tests of Lightning and Accelerate do: fp16 with the scaler that the framework makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from resync_jobs import state_digest
from tailbound.torch import GradScaler
from torch_jobs import batch, model, patient, same_everywhere
from trainer_jobs import as_torchrun

#: Ranks whose gradients overflow, by step: all, one, none.
ILL: list[tuple[int, ...]] = [(), (0, 1), (), (1,), (), ()]
SCALE = 2.0**10


def loss_of(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    data, target = batch(rank, step)
    loss = nn.functional.cross_entropy(net(data).float(), target)
    return loss * (float("inf") if rank in ILL[step] else 1.0)


def check(scales: list[float], moved: list[bool], digests: list[str]) -> None:
    """Overflows lower the scale of all ranks, which skip the step in which all overflow."""
    assert scales == [SCALE, SCALE / 2, SCALE / 2, *[SCALE / 4] * 3]
    assert moved == [len(ranks) < 2 for ranks in ILL]
    assert same_everywhere(digests)


def lightning(rank: int) -> None:
    """Lightning's ``MixedPrecision`` plugin, which holds the scaler; it unscales before it steps."""
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.precision import MixedPrecision
    from pytorch_lightning.strategies import DDPStrategy

    from tailbound.integrations.lightning import TailboundCallback

    as_torchrun(rank, 2)
    scales, moved, digests = list[float](), list[bool](), list[str]()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, _: Any, index: int) -> torch.Tensor:
            return loss_of(self.net, rank, index)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    class Watching(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            self.before = state_digest(module.net, trainer.optimizers[0])

        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            digests.append(state_digest(module.net, trainer.optimizers[0]))
            moved.append(digests[-1] != self.before)
            scales.append(trainer.precision_plugin.scaler.get_scale())
            assert type(trainer.precision_plugin.scaler) is GradScaler

    # precision="16-mixed" makes such a plugin on a GPU
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", SCALE, growth_interval=100))
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[plugin], gradient_clip_val=1.0, use_distributed_sampler=False, **quiet,
        callbacks=[TailboundCallback(**patient(resync_period=0)), Watching()],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(range(len(ILL))))
    check(scales, moved, digests)


def accelerate(rank: int) -> None:
    """Accelerate's wrapper of the optimizer, which holds the scaler and says whether a step was skipped."""
    from accelerate import Accelerator

    from tailbound.integrations.accelerate import register

    as_torchrun(rank, 2)
    accelerator = Accelerator(cpu=True)
    # mixed_precision="fp16" makes one on a GPU, of GradScalerKwargs
    accelerator.scaler = torch.amp.GradScaler("cpu", SCALE, growth_interval=100)
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 1e-3))
    scales, moved, digests = list[float](), list[bool](), list[str]()
    register(accelerator, net, optimizer, **patient(resync_period=0))
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
    check(scales, moved, digests)
    accelerator.end_training()
