"""Lightning over Tailbound: a callback that registers the hook once DDP has wrapped the module.

    torchrun --standalone --nproc-per-node 2 examples/train_lightning.py
    tailbound lab run --workers 2 -- python examples/train_lightning.py

``DDPStrategy(ddp_comm_state=..., ddp_comm_hook=...)`` is not used: Lightning passes those on for CUDA only and ignores
them on CPU without a word, and a state cannot be made before Lightning has made the process group. A callback works for
both. With ``precision="16-mixed"``, pass ``scaler=trainer.precision_plugin.scaler`` to ``register``.
"""

import os

import pytorch_lightning as lightning
import torch
from pytorch_lightning.strategies import DDPStrategy
from task import accuracy, data, model
from torch import nn
from torch.utils.data import DataLoader

import tailbound.torch


class Tailbound(lightning.Callback):
    """Averages gradients by Tailbound from the first step on; put it among a Trainer's callbacks."""

    def __init__(self) -> None:
        self.state: tailbound.torch.TailboundState | None = None

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """DDP and the optimizers are there, no step has been made."""
        # trainer.strategy.model is the DistributedDataParallel wrapper around the module
        self.state = tailbound.torch.register(trainer.strategy.model, optimizer=trainer.optimizers[0])

    def on_validation_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Replicas are made equal before they are evaluated (and saved, which Lightning does after validation)."""
        if self.state is not None:  # Lightning tries a validation before the first step
            self.state.synchronize()

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """The last step is over."""
        assert self.state is not None
        self.state.synchronize()
        delivered = self.state.stats().get("delivered", 1)  # no stats where there is one rank only
        print(f"rank {trainer.global_rank}: {delivered:.2%} of the rows delivered")
        self.state.close()


class Classifier(lightning.LightningModule):
    """Nothing in it knows of Tailbound."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        """Nothing is kept of it: accuracy is told at the end."""
        self.net(batch[0])

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        """Loss of one batch; ``self.log(..., sync_dist=True)`` here would be a barrier in every step."""
        points, labels = batch
        return nn.functional.cross_entropy(self.net(points), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As ever."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Trains and says how well each replica does."""
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=devices,
        num_nodes=int(os.environ["WORLD_SIZE"]) // devices,
        # the options are those of DDP; a model with buffers wants forward_sync_buffers=False (see train_ddp.py)
        strategy=DDPStrategy(process_group_backend="gloo"),
        callbacks=[Tailbound()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    trainer.fit(module, DataLoader(data(), batch_size=32, shuffle=True), DataLoader(data(), batch_size=256))
    print(f"rank {trainer.global_rank}: accuracy {accuracy(module.net):.3f}")


if __name__ == "__main__":
    main()
