"""Host memory that a device copies codes to and from, used again op after op."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

from tailbound.torch.streams import Stream

#: One is filled while the device still reads the other.
_MOST = 2
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
    """Blocks of one stream in one direction: a block comes back with the event after which it may be filled again."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._free: deque[Block] = deque()
        self._made = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> Block:
        """A block with room for ``size`` bytes that nothing reads any more; within ``stream.use``."""
        with self._lock:
            ready = self._free and (self._made >= _MOST or self._free[0].busy.query())
            block = self._free.popleft() if ready else Block(self._stream)
            self._made += not ready
        if block.busy is not None:
            block.busy.synchronize()
        block.reserve(size)
        return block

    def give(self, block: Block) -> None:
        """Takes ``block`` back; the device is through with it after what the stream has been given so far."""
        block.busy = self._stream.event()
        with self._lock:
            self._free.append(block)
