"""Buckets on a device that has no kernels of its own: copied to the host, coded by its compiled passes, copied back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tailbound.codec import decode as decoding
from tailbound.codec import encode as encoding
from tailbound.codec.encode import Encoded
from tailbound.codec.records import Coding, Packets, Received, Scales
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import Shape
from tailbound.torch.device_coder import OnDevice
from tailbound.torch.staging import Block, Blocks


class _Copied(NamedTuple):
    """One op on its way: its values on the host, their memory, and the event behind the copy."""

    values: NDArray[np.float32]
    block: Block
    done: Any


class CopyingCoder(OnDevice):
    """``collective.coder.Coder`` for tensors on a device, contiguous, of any float type.

    Nothing here waits for the device.
    """

    def warm_up(self, x: torch.Tensor, out: torch.Tensor, shape: Shape, coding: Coding) -> None:
        """The compiled passes are warm before the first op (``collective.warmup``)."""

    def begin(self, x: torch.Tensor, shape: Shape, coding: Coding) -> Callable[[], bool]:
        """Queues the copy to the host."""
        stream = self._space.stream
        with stream.use(self._mark):
            block, values = self._memory(self._space.down, shape)
            values.copy_(x.float(), non_blocking=True)
            done = stream.event()
        self._ops[coding.seed] = _Copied(values.numpy(), block, done)
        return lambda: bool(done.query())

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
        """As ``codec.encode.measure``, once the copy is there."""
        return encoding.measure(self._ops[coding.seed].values, shape, coding, need, scratch, groups=groups)

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
        """As ``codec.encode.encode``, once the copy is there."""
        values, block, done = self._ops.pop(coding.seed)
        found = encoding.encode(values, shape, coding, packets, scales, scratch, groups=groups)
        self._space.down.give(block, done)
        return found

    def _decode(
        self, received: Received, shape: Shape, coding: Coding, out: torch.Tensor, scratch: Scratch, stage: int
    ) -> int:
        stream = self._space.stream
        with stream.use(self._mark):
            block, values = self._memory(self._space.up, shape)
            try:
                failed = decoding.decode(received, shape, coding, values.numpy(), scratch, stage=stage)
                out.copy_(values.to(out.device, non_blocking=True))
            finally:
                self._space.up.give(block, stream.event())
        return failed

    @staticmethod
    def _memory(blocks: Blocks, shape: Shape) -> tuple[Block, torch.Tensor]:
        block = blocks.take(4 * shape.numel + 64)
        return block, block.piece(shape.numel, dtype=torch.float32)
