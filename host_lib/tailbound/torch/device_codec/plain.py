"""The plain form: operations of torch, on any device. It is what Triton's kernels are tested with."""

from __future__ import annotations

import torch

from tailbound.codec.hashing import STAGE_CONTRIBUTION, STAGE_RESULT, rounding_seed
from tailbound.codec.records import Coding
from tailbound.codec.shape import Shape
from tailbound.torch.device_codec.decode import restore, values_of_codes, values_of_sums
from tailbound.torch.device_codec.encode import count_beyond, largest_bits, quantised, rotated
from tailbound.torch.device_codec.form import By, Form, Rows


class _Plain:
    name = "torch"

    def largest(self, x: torch.Tensor, shape: Shape, coding: Coding) -> torch.Tensor:
        return largest_bits(self._rotated(x, shape, coding))

    def encode(self, x: torch.Tensor, shape: Shape, coding: Coding, by: By) -> tuple[torch.Tensor, torch.Tensor]:
        y = self._rotated(x, shape, coding)
        beyond = count_beyond(y, by.limits)
        return quantised(y, by.factors, by.keys, rounding_seed(coding.seed, STAGE_CONTRIBUTION)), beyond.view(1)

    def decode(self, rows: Rows, shape: Shape, coding: Coding, out: torch.Tensor) -> None:
        if rows.summed:
            values = values_of_sums(rows.codes, rows.offsets, rows.factors)
        else:
            values = values_of_codes(rows.codes, rows.offsets, rows.factors, rounding_seed(coding.seed, STAGE_RESULT))
        restore(
            values, rows.group_factors, shape, coding.seed, out,
            rotate=coding.rotate, failed=rows.failed, ranges=coding.ranges,
        )  # fmt: skip

    @staticmethod
    def _rotated(x: torch.Tensor, shape: Shape, coding: Coding) -> torch.Tensor:
        return rotated(x, shape, coding.seed, rotate=coding.rotate, ranges=coding.ranges)


PLAIN: Form = _Plain()
