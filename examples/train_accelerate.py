"""Accelerate over Tailbound: register what ``prepare`` returns, and go on as before.

    torchrun --standalone --nproc-per-node 2 examples/train_accelerate.py
    tailbound lab run --workers 2 -- python examples/train_accelerate.py

``accelerate launch`` sets the same variables as torchrun and works as well. Accelerate's own ``comm_hook`` option knows
PyTorch's hooks only.
"""

import torch
from accelerate import Accelerator
from task import accuracy, data, model
from torch import nn
from torch.utils.data import DataLoader

from tailbound.integrations.accelerate import register
from tailbound.torch import batches

EPOCHS = 2


def main() -> None:
    """Trains and says how well each replica does."""
    accelerator = Accelerator(cpu=True)
    net = model()
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.Adam(net.parameters(), lr=1e-3), DataLoader(data(), batch_size=32, shuffle=True)
    )
    state = register(accelerator, net, optimizer)

    for _ in range(EPOCHS):
        for points, labels in batches(loader, state):
            with accelerator.accumulate(net):  # its steps without synchronization skip the hook, too
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(net(points), labels))
                optimizer.step()

    accelerator.end_training()  # all replicas are equal then
    stats = state.stats()
    print(
        f"rank {accelerator.process_index}: accuracy {accuracy(accelerator.unwrap_model(net)):.3f} over "
        f"{stats['datapath']}, {stats['delivered']:.2%} of the rows delivered"
    )


if __name__ == "__main__":
    main()
