"""Data and model of the demo and the training benchmark: handwritten digits of 8 x 8 pixels, and a net that fits them.

The digits ship with scikit-learn (a part of the UCI optical recognition set), so nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tailbound.errors import CapabilityError

#: Digits kept for the test: one in five.
_TEST_EVERY = 5
#: Width of the hidden layers: 10 MiB of gradients in four buckets that close at ``BUCKET_MIB``.
_HIDDEN = 1024
BUCKET_MIB = 2


class Examples(NamedTuple):
    """What a model is shown and what it is to say: of the digits images f32[n, 1, 8, 8] in 0..1 and labels i64[n]."""

    train_inputs: NDArray[Any]
    train_labels: NDArray[np.int64]
    test_inputs: NDArray[Any]
    test_labels: NDArray[np.int64]


def load(seed: int) -> Examples:
    """The digits, shuffled by ``seed`` and split.

    Raises:
        CapabilityError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise CapabilityError("the digits come with scikit-learn: pip install 'tailbound-lab[demo]'") from error
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images = (images[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = labels[order].astype(np.int64)
    test = np.arange(len(labels)) % _TEST_EVERY == 0
    return Examples(images[~test], labels[~test], images[test], labels[test])


def save(examples: Examples, path: Path) -> None:
    """Writes them for the workers, who need not import scikit-learn then."""
    np.savez(path, **examples._asdict())


def restore(path: Path) -> Examples:
    """Reads what ``save`` wrote."""
    with np.load(path) as arrays:
        return Examples(**{name: arrays[name] for name in Examples._fields})


def batches(count: int, ranks: int, per_rank: int, epoch: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """The steps of an epoch: i64[ranks, per_rank] indices into ``count`` images, none twice; the rest is left out."""
    order = np.random.default_rng([seed, epoch]).permutation(count)
    step = ranks * per_rank
    for start in range(0, count - step + 1, step):
        yield order[start : start + step].reshape(ranks, per_rank)


def model(seed: int) -> nn.Module:
    """A net that fills several buckets, the same for the same seed.

    No BatchNorm: running statistics would need barriers of their own.
    """
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, 10),
    )
    for layer in net:  # as for layers of ReLU (He et al., "Delving deep into rectifiers", 2015)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return net
