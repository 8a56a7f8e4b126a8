"""Buckets on a device: coded and decoded there, so that only codes cross to the host (and some bytes a row and group).

Works for any device that torch computes on; with tensors of the host it gives what the compiled passes give.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tailbound.codec import staging
from tailbound.codec.decode import MISSING
from tailbound.codec.encode import Encoded
from tailbound.codec.hashing import STAGE_CONTRIBUTION, STAGE_RESULT, rounding_seed
from tailbound.codec.plan import Factors, Plan, plan
from tailbound.codec.records import Coding, Packets, Received, Scales
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import Shape, shape_for
from tailbound.torch.device_codec.balance import powers
from tailbound.torch.device_codec.decode import restore, values_of_codes, values_of_sums
from tailbound.torch.device_codec.encode import count_beyond, largest_bits, quantised, rotated
from tailbound.torch.staging import Block, Blocks
from tailbound.torch.streams import Stream
from tailbound.wire.bits import Bits
from tailbound.wire.schema import EXPONENT_NONE, HEADER_BYTES, WIDTH_STEP


class Workspace:
    """What all launches on one device share: its stream, and host memory for either direction.

    Args:
        stream: of the device.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.up, self.down = Blocks(stream), Blocks(stream)


class _Ready(NamedTuple):
    """Rotated values on the device, and on the host what they are coded by (``codec.plan``)."""

    y: torch.Tensor
    factors: torch.Tensor
    limits: torch.Tensor
    keys: torch.Tensor


class DeviceCoder:
    """``collective.coder.Coder`` for tensors on a device, contiguous, of any float type.

    Args:
        workspace: of the device.
        mark: where the bucket is ready (``Stream.mark``).
    """

    divisible = False
    bits: Collection[Bits] = (8,)
    feedback = False

    def __init__(self, workspace: Workspace, mark: Any) -> None:
        self._space, self._mark = workspace, mark

    def measure(
        self,
        x: torch.Tensor,
        shape: Shape,
        coding: Coding,
        need: NDArray[np.int16],
        scratch: Scratch,
        *,
        groups: tuple[int, int] | None = None,
    ) -> bool:
        """As ``codec.encode.measure``; ``scratch`` is not used."""
        _whole(shape, groups)
        blocks, unknown = self._space.down, np.full(shape.groups, EXPONENT_NONE, np.int16)
        scales = Scales(unknown, need, np.empty(shape.groups, np.uint8), np.empty(shape.groups, np.uint8))
        with self._space.stream.use(self._mark):
            block = blocks.take(_room(shape, rows=4, groups=16))
            _, done = self._planned(block, x, shape, coding, scales)
            blocks.give(block)
        return done.finite

    def encode(
        self,
        x: torch.Tensor,
        shape: Shape,
        coding: Coding,
        packets: Packets,
        scales: Scales,
        scratch: Scratch,
        *,
        groups: tuple[int, int] | None = None,
    ) -> Encoded:
        """As ``codec.encode.encode``; ``scratch`` is not used."""
        _whole(shape, groups)
        stream, blocks = self._space.stream, self._space.down
        with stream.use(self._mark):
            block = blocks.take(_room(shape, rows=shape.codes + 4, groups=16, more=8))
            ready, done = self._planned(block, x, shape, coding, scales)
            if not done.finite:
                blocks.give(block)
                return Encoded(False, 0)
            factors, limits, keys = (part.to(x.device, non_blocking=True) for part in ready[1:])
            clipped = block.piece(1, dtype=torch.int64)
            clipped.zero_()
            if done.beyond:
                clipped.copy_(count_beyond(ready.y, limits), non_blocking=True)
            codes = block.piece(shape.rows, shape.codes, dtype=torch.uint8)
            rounding = rounding_seed(coding.seed, STAGE_CONTRIBUTION)
            codes.copy_(quantised(ready.y, factors, keys, rounding), non_blocking=True)
            stream.event().synchronize()
            staging.pack(codes.numpy(), shape, scales.skipped, packets)
            found = Encoded(True, int(clipped))
            blocks.give(block)
        return found

    def _planned(
        self, block: Block, x: torch.Tensor, shape: Shape, coding: Coding, scales: Scales
    ) -> tuple[_Ready, Plan]:
        """Rotates on the device, waits for the largest values, and settles on the host how groups are coded."""
        y = rotated(x, shape, coding.seed, rotate=coding.rotate, ranges=coding.ranges)
        bits = block.piece(shape.groups, dtype=torch.int32)
        bits.copy_(largest_bits(y), non_blocking=True)
        factors, limits = (block.piece(shape.groups, dtype=torch.float32) for _ in range(2))
        keys = block.piece(shape.rows, dtype=torch.int32)
        self._space.stream.event().synchronize()
        by = Factors(factors.numpy(), limits.numpy(), keys.numpy().view(np.uint32))
        done = plan(bits.numpy().view(np.uint32), shape, coding, scales, by)
        return _Ready(y, factors, limits, keys), done

    def decode(
        self,
        received: Received,
        shape: Shape,
        coding: Coding,
        out: torch.Tensor,
        scratch: Scratch,
        *,
        groups: tuple[int, int] | None = None,
    ) -> int:
        """As ``codec.decode.decode``, but ``out`` is there only when the stream is; ``scratch`` is not used."""
        _whole(shape, groups)
        stream, blocks, device = self._space.stream, self._space.up, out.device
        summed = received.counts is not None
        width = shape.codes * (2 if summed else 1)
        with stream.use(self._mark):
            block = blocks.take(_room(shape, rows=width + 12, groups=4))
            codes = block.piece(shape.rows, width, dtype=torch.uint8)
            factors = block.piece(shape.rows, dtype=torch.float32)
            zeros, keys = (block.piece(shape.rows, dtype=torch.int32) for _ in range(2))
            group_factors = block.piece(shape.groups, dtype=torch.float32)
            try:
                block_of = staging.Unpacked(
                    codes.numpy(), factors.numpy(), zeros.numpy(), keys.numpy(), group_factors.numpy()
                )
                failed = staging.unpack(received, shape, coding.seed, block_of)
                there, by_row, by_group = (t.to(device, non_blocking=True) for t in (codes, factors, group_factors))
                if summed:
                    values = values_of_sums(there, zeros.to(device, non_blocking=True), by_row)
                else:
                    rounding = rounding_seed(coding.seed, STAGE_RESULT)
                    values = values_of_codes(there, keys.to(device, non_blocking=True), by_row, rounding)
                rotate, ranges = coding.rotate, coding.ranges
                restore(values, by_group, shape, coding.seed, out, rotate=rotate, failed=failed > 0, ranges=ranges)
            finally:
                blocks.give(block)
        return failed

    def powers(self, average: torch.Tensor, shape: Shape, ends: NDArray[np.int64]) -> NDArray[np.float64]:
        """As ``codec.balance.powers``, of all entries; waits for the device."""
        with self._space.stream.use(self._mark):
            return powers(average, ends).double().cpu().numpy()

    def clear(self, average: torch.Tensor) -> None:
        """Makes the average zero."""
        with self._space.stream.use(self._mark):
            average.zero_()

    def keep(self, x: torch.Tensor, average: torch.Tensor) -> None:
        """Makes the own values the average."""
        with self._space.stream.use(self._mark):
            average.copy_(x)


def _whole(shape: Shape, groups: tuple[int, int] | None) -> None:
    """A device shares out the work by itself."""
    if groups not in (None, (0, shape.groups)):
        raise ValueError(f"groups {groups} of {shape.groups}: a device codes all of an op at once")


def _room(shape: Shape, *, rows: int = 0, groups: int = 0, more: int = 0) -> int:
    """Bytes for so many a row, a group and an op, and for the gaps between up to eight pieces."""
    return rows * shape.rows + groups * shape.groups + more + 8 * 64


def warm_up() -> None:
    """Compiles, or loads from the cache, what packs and unpacks, before the first packet is due."""
    shape = shape_for(WIDTH_STEP, WIDTH_STEP)
    packets = np.zeros((shape.rows, HEADER_BYTES + shape.codes), np.uint8)
    codes = np.zeros((shape.rows, shape.codes), np.uint8)
    position = np.arange(shape.rows, dtype=np.int32)
    skipped, partials = np.zeros(shape.groups, np.uint8), np.zeros((shape.rows, 4), np.uint64)
    staging.pack(codes, shape, skipped, Packets(packets, position, partials))
    exponents, factors = np.zeros(shape.groups, np.int16), np.zeros(shape.groups, np.float32)
    scales = Scales(exponents, exponents.copy(), skipped.copy(), skipped)
    by = Factors(factors, factors.copy(), np.zeros(shape.rows, np.uint32))
    plan(np.zeros(shape.groups, np.uint32), shape, Coding(0), scales, by)
    of_rows = np.zeros(shape.rows, np.float32)
    received = Received(codes, packets, np.full(shape.rows, MISSING), of_rows)
    of_each = np.zeros(shape.rows, np.int32)
    out = staging.Unpacked(codes.copy(), of_rows.copy(), of_each, of_each.copy(), factors)
    staging.unpack(received, shape, 0, out)
