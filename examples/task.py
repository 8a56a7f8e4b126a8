"""What the examples train: a small classifier on made-up data, the same on every rank. Put your own in its place."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

CLASSES, INPUTS = 10, 64


def data(train: bool = True) -> TensorDataset:
    """Noisy points around ten centres: 4096 (f32[64], i64) to train with, or 1024 others to evaluate with."""
    centres = torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 if train else 2)
    labels = torch.randint(0, CLASSES, (4096 if train else 1024,), generator=generator)
    return TensorDataset(centres[labels] + 2 * torch.randn(len(labels), INPUTS, generator=generator), labels)


def model() -> nn.Sequential:
    """A multi-layer perceptron of 26,000 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))


@torch.no_grad()
def accuracy(net: nn.Module) -> float:
    """Share of the evaluation data that ``net`` gets right."""
    points, labels = data(train=False).tensors
    return float((net(points).argmax(1) == labels).float().mean())
