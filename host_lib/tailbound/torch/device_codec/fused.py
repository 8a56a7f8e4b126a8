"""Triton's form: for each size of group one launch finds the largest values, one makes codes, one makes averages."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tailbound.codec.hashing import COLUMN, STAGE_CONTRIBUTION, mix, rounding_seed
from tailbound.codec.records import Coding
from tailbound.codec.shape import Shape
from tailbound.torch.device_codec import triton_kernels
from tailbound.torch.device_coder import By, Form, Largest, Rows

#: Columns of a program, and its warps: one column a thread, so that all rows of it are in one thread's registers.
BLOCK, WARPS = 128, 4
#: How every kernel is launched. A fused multiply-add would round once where the host rounds twice.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}


class _Fused:
    name = "triton"

    def largest(self, x: torch.Tensor, shape: Shape, coding: Coding) -> Largest:
        bits, columns = torch.zeros(shape.groups, dtype=torch.int32, device=x.device), _columns_of(shape)
        squares = None
        if shape.code.clips:
            squares = torch.empty((shape.groups, columns), dtype=torch.float64, device=x.device)
        place = shape.entries, signed(coding.seed)
        for rows, groups, layout in _sizes(shape, x.device):
            triton_kernels.largest[len(groups), columns](
                x, bits, x if squares is None else squares, groups, *layout, *place, **_how(rows, coding),
                SQUARES=squares is not None,
            )  # fmt: skip
        return Largest(bits, None if squares is None else squares.sum(1))

    def encode(self, x: torch.Tensor, shape: Shape, coding: Coding, by: By) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.empty((shape.rows, shape.codes), dtype=torch.uint8, device=x.device)
        beyond = torch.zeros(1, dtype=torch.int64, device=x.device)
        place = shape.entries, signed(coding.seed), _first_column(coding, STAGE_CONTRIBUTION)
        for rows, groups, layout in _sizes(shape, x.device):
            triton_kernels.encode[len(groups), _columns_of(shape)](
                x, *by, codes, beyond, groups, *layout, *place, **_how(rows, coding), **_of(shape)
            )
        return codes, beyond

    def decode(self, rows: Rows, shape: Shape, coding: Coding, out: torch.Tensor) -> None:
        place = shape.entries, signed(coding.seed), _first_column(coding, rows.stage)
        given = rows.codes, rows.factors, rows.offsets, rows.offsets, rows.group_factors, out
        for size, groups, layout in _sizes(shape, out.device):
            triton_kernels.decode[len(groups), _columns_of(shape)](
                *given, groups, *layout, *place, **_how(size, coding), SUMMED=rows.summed, **_of(shape)
            )


@lru_cache(maxsize=256)
def _sizes(shape: Shape, device: torch.device) -> list[tuple[int, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
    """The groups of an op by their rows: how many rows, i32 groups, and ``shape.layout`` on the device."""
    rows, entries, _ = shape.layout
    layout = torch.from_numpy(rows.copy()).to(device), torch.from_numpy(entries.copy()).to(device)
    by_size = [(size, np.flatnonzero(np.diff(rows) == size).astype(np.int32)) for size in shape.sizes]
    return [(size, torch.from_numpy(groups).to(device), layout) for size, groups in by_size]


def signed(word: int) -> int:
    """The i32 with the bits of a u32 (``word`` is taken modulo 2**32)."""
    return (word + (1 << 31) & 0xFFFFFFFF) - (1 << 31)


def _columns_of(shape: Shape) -> int:
    """Programs that share the columns of a group."""
    return -(-shape.entries // BLOCK)


def _how(rows: int, coding: Coding) -> dict[str, Any]:
    return {"ROWS": rows, "BLOCK": BLOCK, "ROTATE": coding.rotate and rows > 1, **OPTIONS}


def _of(shape: Shape) -> dict[str, int]:
    return {"PACKING": shape.code.packing, "ZERO": shape.code.zero}


def _first_column(coding: Coding, stage: int) -> int:
    """What the columns' parts in the rounding offsets begin with."""
    return signed(mix(rounding_seed(coding.seed, stage) ^ COLUMN))


TRITON: Form = _Fused()
