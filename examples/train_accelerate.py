"""Accelerate over Tailbound: register the model that ``prepare`` returns, which is a DistributedDataParallel one.

    torchrun --standalone --nproc-per-node 2 examples/train_accelerate.py
    tailbound lab run --workers 2 -- python examples/train_accelerate.py

``accelerate launch`` sets the same variables as torchrun and works as well. Accelerate's own ``comm_hook`` option knows
PyTorch's hooks only. With ``mixed_precision="fp16"``, pass ``scaler=accelerator.scaler`` to ``register``.
"""

import torch
from accelerate import Accelerator
from task import accuracy, data, model
from torch import nn
from torch.utils.data import DataLoader

import tailbound.torch

EPOCHS = 2


def main() -> None:
    """Trains and says how well each replica does."""
    accelerator = Accelerator(cpu=True)
    net = model()
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.Adam(net.parameters(), lr=1e-3), DataLoader(data(), batch_size=32, shuffle=True)
    )

    # A model with buffers (BatchNorm's, say) wants net.broadcast_buffers = False here: no barrier before every forward
    # pass. The optimizer that steps is inside Accelerate's wrapper.
    state = tailbound.torch.register(net, optimizer=optimizer.optimizer)

    for _ in range(EPOCHS):
        for points, labels in tailbound.torch.batches(loader, state):
            with accelerator.accumulate(net):  # its steps without synchronization skip the hook, too
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(net(points), labels))
                optimizer.step()

    state.synchronize()  # before accelerator.save_state(), too
    stats = state.stats()  # empty where there is one rank only
    print(
        f"rank {accelerator.process_index}: accuracy {accuracy(accelerator.unwrap_model(net)):.3f} over "
        f"{stats['datapath']}, {stats['delivered']:.2%} of the rows delivered"
    )
    state.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
