"""Lightning over Tailbound: a callback among those of the Trainer.

    torchrun --standalone --nproc-per-node 2 examples/train_lightning.py
    tailbound lab run --workers 2 -- python examples/train_lightning.py

The options ``ddp_comm_state`` and ``ddp_comm_hook`` of ``DDPStrategy`` do not serve: Lightning passes them on for CUDA
only.
"""

import os

import pytorch_lightning as lightning
import torch
from pytorch_lightning.strategies import DDPStrategy
from task import accuracy, data, model
from torch import nn
from torch.utils.data import DataLoader

from tailbound.integrations.lightning import TailboundCallback


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
    callback = TailboundCallback()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=devices,
        num_nodes=int(os.environ["WORLD_SIZE"]) // devices,
        strategy=DDPStrategy(process_group_backend="gloo"),
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    trainer.fit(module, DataLoader(data(), batch_size=32, shuffle=True), DataLoader(data(), batch_size=256))
    print(f"rank {trainer.global_rank}: accuracy {accuracy(module.net):.3f}")
    if callback.state is not None:  # there are two ranks or more
        stats = callback.state.stats()
        print(f"rank {trainer.global_rank}: over {stats['datapath']}, {stats['delivered']:.2%} of the rows delivered")


if __name__ == "__main__":
    main()
