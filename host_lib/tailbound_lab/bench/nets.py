"""Models for the training benchmark: for the digits one whose gradients are large and one that computes long; a GPT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from tailbound_lab.bench.digits import initialised, model
from tailbound_lab.bench.gpt import GPT, LARGE

#: Width and number of the layers of ``wide``, with 16 MiB of gradients each; of the convolutions of ``deep``.
_WIDE, _LAYERS = 2048, 6
_CHANNELS, _DEPTH = 192, 6


def wide(seed: int) -> nn.Module:
    """Fully connected layers: 25 M parameters, 101 MB of gradients, and as little to compute as these allow."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, _WIDE), nn.ReLU()]
    for _ in range(_LAYERS):
        layers += [nn.Linear(_WIDE, _WIDE), nn.ReLU()]
    return initialised(nn.Sequential(*layers, nn.Linear(_WIDE, 10)))


def deep(seed: int) -> nn.Module:
    """Convolutions at full resolution: 1.7 M parameters, 7 MB of gradients, 105 million products an image."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Conv2d(1, _CHANNELS, 3, padding=1), nn.ReLU()]
    for _ in range(_DEPTH - 1):
        layers += [nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1), nn.ReLU()]
    return initialised(nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4 * _CHANNELS, 10)))


#: Models by name, made from a seed. ``digits`` is the demo's.
NETS: Mapping[str, Callable[[int], nn.Module]] = {
    "digits": model, "wide": wide, "deep": deep, "gpt": partial(GPT, LARGE),
}  # fmt: skip
