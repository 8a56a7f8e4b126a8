"""Exponents of tensors on a device (codec-18): entries times powers of two by ranges, and mean squares by ranges."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tailbound.codec.balance import Ranges


def by_entry(factors: NDArray[np.float32], ranges: Ranges, numel: int, device: torch.device) -> torch.Tensor | None:
    """The factor of each of ``numel`` entries' ranges, f32[numel] on ``device``; None where all are 1."""
    if not len(ranges.ends):
        return None
    sizes = _sizes(ranges.ends, numel).to(device, non_blocking=True)
    powers = torch.from_numpy(factors).to(device, non_blocking=True)
    return torch.repeat_interleave(powers, sizes, output_size=numel)


def powers(values: torch.Tensor, ends: NDArray[np.int64]) -> torch.Tensor:
    """Mean square of each range of ``values`` (any float type, [numel]) that ends at ``ends``: f32[n]."""
    sizes = _sizes(ends, len(values)).to(values.device)
    return torch.segment_reduce(values.float().square(), "mean", lengths=sizes)


def _sizes(ends: NDArray[np.int64], numel: int) -> torch.Tensor:
    """Entries of each range; the last one takes all that is left."""
    stops = ends.copy()
    stops[-1] = numel
    return torch.from_numpy(np.diff(stops, prepend=0))
