"""Accelerate over Tailbound: register the model that ``prepare`` returns, which is a DistributedDataParallel one.

    torchrun --standalone --nproc-per-node 2 examples/train_accelerate.py
    tailbound lab run --workers 2 -- python examples/train_accelerate.py

``accelerate launch`` sets the same variables as torchrun and works as well. Accelerate's own ``comm_hook`` option knows
PyTorch's hooks only.
"""

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from task import accuracy, data, model
from torch import nn
from torch.utils.data import DataLoader

import tailbound.torch

EPOCHS = 2


def main() -> None:
    """Trains and says how well each replica does."""
    ddp_options = DistributedDataParallelKwargs(broadcast_buffers=False)  # no barrier before every forward pass
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp_options])
    net = model()
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.Adam(net.parameters(), lr=1e-3), DataLoader(data(), batch_size=32, shuffle=True)
    )

    # The optimizer that steps is inside Accelerate's wrapper.
    state = tailbound.torch.register(net, optimizer=optimizer.optimizer)

    for _ in range(EPOCHS):
        for points, labels in tailbound.torch.batches(loader, state):
            with accelerator.accumulate(net):  # its steps without synchronisation skip the hook, too
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(net(points), labels))
                optimizer.step()

    state.synchronise()  # before accelerator.save_state(), too
    stats = state.stats()  # empty where there is one rank only
    print(
        f"rank {accelerator.process_index}: accuracy {accuracy(accelerator.unwrap_model(net)):.3f} over "
        f"{stats.get('datapath', 'nothing')}, {stats.get('delivered', 1):.2%} of the rows delivered"
    )
    state.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
