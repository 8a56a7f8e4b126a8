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
from tailbound.codec.plan import Plan, plan
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import Shape, shape_for
from tailbound.torch.device_codec.decode import restore, values_of_codes, values_of_sums
from tailbound.torch.device_codec.encode import count_beyond, largest_bits, quantised, rotated
from tailbound.torch.staging import Block, Blocks
from tailbound.torch.streams import Stream
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
    bits: Collection[int] = (8,)
    feedback = False

    def __init__(self, workspace: Workspace, mark: Any) -> None:
        self._space, self._mark = workspace, mark

    def measure(
        self,
        x: torch.Tensor,
        shape: Shape,
        seed: int,
        scratch: Scratch,
        need: NDArray[np.int16],
        *,
        rotate: bool = True,
        groups: tuple[int, int] | None = None,
    ) -> bool:
        """As ``codec.encode.measure``; ``scratch`` is not used."""
        _whole(shape, groups)
        blocks = self._space.down
        with self._space.stream.use(self._mark):
            block = blocks.take(_room(shape, rows=2, groups=16))
            _, done = self._planned(
                block, x, shape, seed, 0, 0, np.full(shape.groups, EXPONENT_NONE, np.int16), need,
                np.empty(shape.groups, np.uint8), np.empty(shape.groups, np.uint8), rotate=rotate,
            )  # fmt: skip
            blocks.give(block)
        return done.finite

    def encode(
        self,
        x: torch.Tensor,
        shape: Shape,
        seed: int,
        rank: int,
        shift_cap: int,
        exponents: NDArray[np.int16],
        packets: NDArray[np.uint8],
        position: NDArray[np.int32],
        partials: NDArray[np.uint64],
        scratch: Scratch,
        need: NDArray[np.int16],
        shift: NDArray[np.uint8],
        skipped: NDArray[np.uint8],
        *,
        rotate: bool = True,
        groups: tuple[int, int] | None = None,
    ) -> Encoded:
        """As ``codec.encode.encode``; ``scratch`` is not used."""
        _whole(shape, groups)
        stream, blocks = self._space.stream, self._space.down
        with stream.use(self._mark):
            block = blocks.take(_room(shape, rows=shape.codes + 2, groups=16, more=8))
            ready, done = self._planned(
                block, x, shape, seed, rank, shift_cap, exponents, need, shift, skipped, rotate=rotate
            )
            if not done.finite:
                blocks.give(block)
                return Encoded(False, 0)
            factors, limits, keys = (part.to(x.device, non_blocking=True) for part in ready[1:])
            clipped = block.piece(1, dtype=torch.int64)
            clipped.zero_()
            if done.beyond:
                clipped.copy_(count_beyond(ready.y, limits), non_blocking=True)
            codes = block.piece(shape.rows, shape.codes, dtype=torch.uint8)
            codes.copy_(quantised(ready.y, factors, keys), non_blocking=True)
            stream.event().synchronize()
            staging.pack(codes.numpy(), shape, position, skipped, packets, partials)
            found = Encoded(True, int(clipped))
            blocks.give(block)
        return found

    def _planned(
        self,
        block: Block,
        x: torch.Tensor,
        shape: Shape,
        seed: int,
        rank: int,
        shift_cap: int,
        exponents: NDArray[np.int16],
        need: NDArray[np.int16],
        shift: NDArray[np.uint8],
        skipped: NDArray[np.uint8],
        *,
        rotate: bool,
    ) -> tuple[_Ready, Plan]:
        """Rotates on the device, waits for the largest values, and settles on the host how groups are coded."""
        y = rotated(x, shape, seed, rotate=rotate)
        bits = block.piece(shape.groups, dtype=torch.int32)
        bits.copy_(largest_bits(y), non_blocking=True)
        factors, limits = (block.piece(shape.groups, dtype=torch.float32) for _ in range(2))
        keys = block.piece(shape.rows // 2, dtype=torch.int32)
        self._space.stream.event().synchronize()
        done = plan(
            bits.numpy().view(np.uint32), shape, seed, rank, shift_cap, exponents, need, shift, skipped,
            factors.numpy(), limits.numpy(), keys.numpy().view(np.uint32), rotate=rotate,
        )  # fmt: skip
        return _Ready(y, factors, limits, keys), done

    def decode(
        self,
        ring: NDArray[np.uint8],
        own: NDArray[np.uint8],
        source: NDArray[np.int64],
        scale: NDArray[np.float32],
        shape: Shape,
        seed: int,
        scratch: Scratch,
        average: torch.Tensor,
        *,
        rotate: bool = True,
        groups: tuple[int, int] | None = None,
        counts: NDArray[np.uint16] | None = None,
    ) -> int:
        """As ``codec.decode.decode``, but ``average`` is there only when the stream is; ``scratch`` is not used."""
        _whole(shape, groups)
        stream, blocks, device = self._space.stream, self._space.up, average.device
        width = shape.codes * (1 if counts is None else 2)
        with stream.use(self._mark):
            block = blocks.take(_room(shape, rows=width + 8, groups=4))
            codes = block.piece(shape.rows, width, dtype=torch.uint8)
            factors = block.piece(shape.rows, dtype=torch.float32)
            zeros = block.piece(shape.rows, dtype=torch.int32)
            group_factors = block.piece(shape.groups, dtype=torch.float32)
            try:
                failed = staging.unpack(
                    ring, own, source, scale, shape, codes.numpy(), factors.numpy(), zeros.numpy(),
                    group_factors.numpy(), counts=counts,
                )  # fmt: skip
                there, by_row, by_group = (t.to(device, non_blocking=True) for t in (codes, factors, group_factors))
                if counts is None:
                    values = values_of_codes(there, by_row)
                else:
                    values = values_of_sums(there, zeros.to(device, non_blocking=True), by_row)
                restore(values, by_group, shape, seed, average, rotate=rotate, failed=failed > 0)
            finally:
                blocks.give(block)
        return failed

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
    staging.pack(
        codes, shape, position, np.zeros(shape.groups, np.uint8), packets, np.zeros((shape.rows, 4), np.uint64)
    )
    plan(
        np.zeros(shape.groups, np.uint32), shape, 0, 0, 0, np.zeros(shape.groups, np.int16),
        np.zeros(shape.groups, np.int16), np.zeros(shape.groups, np.uint8), np.zeros(shape.groups, np.uint8),
        np.zeros(shape.groups, np.float32), np.zeros(shape.groups, np.float32), np.zeros(shape.rows // 2, np.uint32),
    )  # fmt: skip
    staging.unpack(
        codes, packets, np.full(shape.rows, MISSING), np.zeros(shape.rows, np.float32), shape, codes.copy(),
        np.zeros(shape.rows, np.float32), np.zeros(shape.rows, np.int32), np.zeros(shape.groups, np.float32),
    )  # fmt: skip
