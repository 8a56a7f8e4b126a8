"""A device's part of the codec in numpy: stands in for Triton's kernels, which a host has only in an interpreter."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

import reference
from tailbound.codec.hashing import STAGE_CONTRIBUTION
from tailbound.codec.records import Coding
from tailbound.codec.shape import Shape
from tailbound.torch.device_coder import By, Form, Largest, Rows


class _Plain:
    name = "plain"

    def largest(self, x: torch.Tensor, shape: Shape, coding: Coding) -> Largest:
        values, y = _rotated(x, shape, coding)
        of_rows, first = (y.view(np.int32) & 0x7FFFFFFF).max(axis=1), shape.layout.rows[:-1]
        bits = np.maximum.reduceat(of_rows, first)
        if shape.bits != 4:
            return Largest(_there(bits, x))
        squares = np.square(reference.in_rows(values, shape), dtype=np.float64).sum(axis=1)
        return Largest(_there(bits, x), _there(np.add.reduceat(squares, first), x))

    def encode(self, x: torch.Tensor, shape: Shape, coding: Coding, by: By) -> tuple[torch.Tensor, torch.Tensor]:
        _, y = _rotated(x, shape, coding)
        factors, limits, keys = (part.cpu().numpy() for part in by)
        of = shape.layout.of
        beyond = np.count_nonzero(np.abs(y) > limits[of, None])
        parts = reference.columns(shape.entries, coding.seed, STAGE_CONTRIBUTION)
        u = reference.with_zero((parts + keys[:, None]) % 65536, shape.bits)
        payload = reference.pack(reference.code(y * factors[of, None] + u, shape.bits), shape.bits)
        return _there(payload, x), torch.tensor([beyond], device=x.device)

    def decode(self, rows: Rows, shape: Shape, coding: Coding, out: torch.Tensor) -> None:
        octets, factors, offsets, of_groups = (part.cpu().numpy() for part in rows[:4])
        if rows.summed:
            fixed = octets.view(">u2").astype(np.int64) - offsets[:, None]
        elif shape.bits == 16:
            fixed = reference.unpack(octets, 16) - reference.zero_of(16)
        else:
            parts = reference.columns(shape.entries, coding.seed, rows.stage)
            taken = np.where(offsets[:, None] >= 0, 32767 - (offsets[:, None] - parts) % 65536, 0)
            fixed = 65536 * (reference.unpack(octets, shape.bits) - reference.zero_of(shape.bits)) - taken
            factors = factors * np.float32(2.0**-16)
        y = fixed.astype(np.float32) * factors[:, None]
        out.copy_(torch.from_numpy(reference.turned_back(y, of_groups, shape, coding.seed, coding.rotate)))


def _rotated(x: torch.Tensor, shape: Shape, coding: Coding) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Values, f32[numel], and once rotated, f32[T, V]."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = x.float().cpu().numpy()
        return values, reference.rotated(values, shape, coding.seed, coding.rotate)


def _there(found: NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(found).to(like.device)


PLAIN: Form = _Plain()
