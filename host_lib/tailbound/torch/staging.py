"""Host memory that a device copies codes to and from, used again op after op."""

from __future__ import annotations

import threading
from typing import Any

import torch

from tailbound.torch.streams import Stream

_ALIGN = 64


class Block:
    """One stretch of host memory, handed out in pieces from its beginning.

    Args:
        stream: whose device copies to and from it.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self.busy: Any = None

    def reserve(self, size: int) -> None:
        """Begins anew, with room for ``size`` bytes and 64 more for every piece; within ``stream.use``."""
        if self._memory.numel() < size:
            self._memory = self._stream.host_memory(size)
        self._used = 0

    def lacks(self, size: int) -> int:
        """How far its memory is from ``size`` bytes: what it has too much, or, far worse, too little."""
        more = self._memory.numel() - size
        return more if more >= 0 else (1 << 62) - self._memory.numel()

    def piece(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """The next ``shape`` entries of ``dtype``, contiguous, aligned to a cache line, not initialised."""
        count = dtype.itemsize
        for extent in shape:
            count *= extent
        part = self._memory[self._used : self._used + count]
        if part.numel() != count:
            raise ValueError(f"{count} bytes do not fit a block of {self._memory.numel()} with {self._used} used")
        self._used += count + -count % _ALIGN
        return part.view(dtype).view(shape)


class Blocks:
    """Blocks of one stream in one direction: a block comes back with the event after which it may be filled again.

    Nobody waits for one. There come to be as many as were ever under way at once.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._free: list[Block] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> Block:
        """A block with room for ``size`` bytes that nothing reads any more; within ``stream.use``."""
        with self._lock:
            idle = [block for block in self._free if block.busy.query()]
            block = min(idle, key=lambda block: block.lacks(size), default=None) or Block(self._stream)
            if block in idle:
                self._free.remove(block)
        block.reserve(size)
        return block

    def give(self, block: Block, busy: Any) -> None:
        """Takes ``block`` back; the device is through with it after the event ``busy``."""
        block.busy = busy
        with self._lock:
            self._free.append(block)
