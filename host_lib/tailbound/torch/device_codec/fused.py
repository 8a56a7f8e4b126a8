"""Triton's form: one launch finds the largest values, one makes codes, one makes averages."""

from __future__ import annotations

from typing import Any

import torch

from tailbound.codec.hashing import COLUMN, STAGE_CONTRIBUTION, mix, rounding_seed
from tailbound.codec.records import Coding
from tailbound.codec.shape import Shape
from tailbound.torch.device_codec import triton_kernels
from tailbound.torch.device_codec.form import By, Form, Largest, Rows

#: Columns of a program, and its warps: one column a thread, so that all rows of it are in one thread's registers.
BLOCK, WARPS = 128, 4
#: How every kernel is launched. A fused multiply-add would round once where the host rounds twice.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}


class _Fused:
    name = "triton"

    def largest(self, x: torch.Tensor, shape: Shape, coding: Coding) -> Largest:
        bits = torch.zeros(shape.groups, dtype=torch.int32, device=x.device)
        squares = torch.empty(_grid(shape), dtype=torch.float64, device=x.device) if shape.bits == 4 else None
        place = shape.numel, shape.entries, signed(coding.seed)
        triton_kernels.largest[_grid(shape)](
            x, bits, _any(squares, x), *place, **_how(shape, coding), SQUARES=squares is not None
        )
        return Largest(bits, None if squares is None else squares.sum(1))

    def encode(self, x: torch.Tensor, shape: Shape, coding: Coding, by: By) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.empty((shape.rows, shape.codes), dtype=torch.uint8, device=x.device)
        beyond = torch.zeros(1, dtype=torch.int64, device=x.device)
        place = shape.numel, shape.entries, signed(coding.seed), _columns(coding, STAGE_CONTRIBUTION)
        triton_kernels.encode[_grid(shape)](x, *by, codes, beyond, *place, **_how(shape, coding), BITS=shape.bits)
        return codes, beyond

    def decode(self, rows: Rows, shape: Shape, coding: Coding, out: torch.Tensor) -> None:
        place = shape.numel, shape.entries, signed(coding.seed), _columns(coding, rows.stage)
        triton_kernels.decode[_grid(shape)](
            rows.codes, rows.factors, rows.offsets, rows.offsets, rows.group_factors, out, *place,
            **_how(shape, coding), SUMMED=rows.summed, BITS=shape.bits,
        )  # fmt: skip


def signed(word: int) -> int:
    """The i32 with the bits of a u32 (``word`` is taken modulo 2**32)."""
    return (word + (1 << 31) & 0xFFFFFFFF) - (1 << 31)


def _grid(shape: Shape) -> tuple[int, int]:
    return shape.groups, -(-shape.entries // BLOCK)


def _how(shape: Shape, coding: Coding) -> dict[str, Any]:
    return {"ROWS": shape.group_rows, "BLOCK": BLOCK, "ROTATE": coding.rotate, **OPTIONS}


def _columns(coding: Coding, stage: int) -> int:
    """What the columns' parts in the rounding offsets begin with."""
    return signed(mix(rounding_seed(coding.seed, stage) ^ COLUMN))


def _any(given: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A kernel's argument that is not read where there is none."""
    return other if given is None else given


TRITON: Form = _Fused()
