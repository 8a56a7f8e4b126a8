"""The Hadamard transform over the rows of a group, as torch operations on any device.

Butterflies, not a product with H_R: replicas decode for themselves, and on machines of different kinds they stay equal
only if every addition is made in the same order. A matrix product leaves its order (and, with TF32, its precision) to
the library. The transform is bound by memory either way: six sweeps over a bucket.
"""

from __future__ import annotations

import torch

#: Distances of the stages; the same order as in ``codec.kernels`` and ``codec.reference``.
_STAGES = (8, 16, 32, 1, 2, 4)


def transform(y: torch.Tensor) -> torch.Tensor:
    """H_R along the middle axis of f32[G, R, V] (contiguous), not normalised; ``y`` is overwritten."""
    groups, rows, codes = y.shape
    other = torch.empty_like(y)
    for step in _STAGES:
        if step < rows:
            pairs = (groups, rows // (2 * step), 2, step, codes)
            source, target = y.view(pairs), other.view(pairs)
            a, b = source[:, :, 0], source[:, :, 1]
            torch.add(a, b, out=target[:, :, 0])
            torch.sub(a, b, out=target[:, :, 1])
            y, other = other, y
    return y
