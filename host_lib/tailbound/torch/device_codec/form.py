"""The form in which a device codes: kernels of Triton, and in tests what stands in for them. Their bits are the same.

A form keeps nothing and waits for nothing. What it returns is queued on the current stream.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from tailbound.codec.hashing import STAGE_RESULT
from tailbound.codec.records import Coding
from tailbound.codec.shape import Shape


class By(NamedTuple):
    """What codes are made by, on the device: ``codec.plan.Factors``, keys as i32[T]."""

    factors: torch.Tensor
    limits: torch.Tensor
    keys: torch.Tensor


class Largest(NamedTuple):
    """What decides how groups are coded: bits of their largest values, i32[G], and for codes of 4 bits the sums of
    squares before rotation, f64[G].
    """

    bits: torch.Tensor
    squares: torch.Tensor | None = None


class Rows(NamedTuple):
    """What averages are made of, on the device: ``codec.staging.Unpacked``.

    Attributes:
        codes: u8[T, bytes of a row], twice as many if ``summed``.
        offsets: i32[T], ``keys``, or ``zeros`` if ``summed``.
        failed: whether there are groups of which nothing was received.
        stage: whose rounding offsets the codes have.
    """

    codes: torch.Tensor
    factors: torch.Tensor
    offsets: torch.Tensor
    group_factors: torch.Tensor
    summed: bool
    failed: bool
    stage: int = STAGE_RESULT


class Form(Protocol):
    """How a device does its part."""

    #: as ``stats()`` says it
    name: str

    def largest(self, x: torch.Tensor, shape: Shape, coding: Coding) -> Largest:
        """Of each group of ``x`` (any float type, [numel]) once rotated."""

    def encode(self, x: torch.Tensor, shape: Shape, coding: Coding, by: By) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes of codes of ``x``, u8[T, bytes of a row], and how many rotated values are beyond limits, i64[1]."""

    def decode(self, rows: Rows, shape: Shape, coding: Coding, out: torch.Tensor) -> None:
        """What ``rows``, of ``shape``, say to ``out`` (any float type, [numel])."""
