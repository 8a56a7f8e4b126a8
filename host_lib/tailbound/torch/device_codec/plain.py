"""The plain form: operations of torch, on any device. It is what Triton's kernels are tested with."""

from __future__ import annotations

import torch

from tailbound.codec.hashing import STAGE_CONTRIBUTION, rounding_seed
from tailbound.codec.records import Coding
from tailbound.codec.shape import Shape
from tailbound.torch.device_codec.decode import restore, values_of_codes, values_of_sums
from tailbound.torch.device_codec.encode import count_beyond, largest_bits, padded, quantised, rotated, squares
from tailbound.torch.device_codec.form import By, Form, Largest, Rows


class _Plain:
    name = "torch"

    def largest(self, x: torch.Tensor, shape: Shape, coding: Coding) -> Largest:
        y = padded(x, shape, coding.ranges)
        sums = squares(y) if shape.bits == 4 else None
        return Largest(largest_bits(rotated(y, coding.seed) if coding.rotate else y), sums)

    def encode(self, x: torch.Tensor, shape: Shape, coding: Coding, by: By) -> tuple[torch.Tensor, torch.Tensor]:
        y = padded(x, shape, coding.ranges)
        y = rotated(y, coding.seed) if coding.rotate else y
        beyond = count_beyond(y, by.limits)
        rounding = rounding_seed(coding.seed, STAGE_CONTRIBUTION)
        return quantised(y, by.factors, by.keys, rounding, shape.bits), beyond.view(1)

    def decode(self, rows: Rows, shape: Shape, coding: Coding, out: torch.Tensor) -> None:
        if rows.summed:
            values = values_of_sums(rows.codes, rows.offsets, rows.factors)
        else:
            rounding = rounding_seed(coding.seed, rows.stage)
            values = values_of_codes(rows.codes, rows.offsets, rows.factors, rounding, shape.bits)
        restore(
            values, rows.group_factors, shape, coding.seed, out,
            rotate=coding.rotate, failed=rows.failed, ranges=coding.ranges,
        )  # fmt: skip


PLAIN: Form = _Plain()
