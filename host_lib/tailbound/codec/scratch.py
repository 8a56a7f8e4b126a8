"""Memory that the codec works in: made once for each thread, used for every op."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.laid import laid, words_at
from tailbound.codec.loader import loader
from tailbound.codec.scale import ZERO
from tailbound.codec.shape import GROUP_ROWS
from tailbound.errors import ConfigError
from tailbound.wire.schema import WIDTH_STEP

#: Rows of ``work`` are this many float32 apart beyond their length: rows at a power-of-two distance would fight for
#: the same cache sets.
PITCH_EXTRA = 16
#: Bytes of a line of the caches.
_LINE = 64
#: Words of a pass's call, at most so many.
Words = ctypes.c_int64 * 32


@laid
class Memory(NamedTuple):
    """What compiled passes work in.

    Attributes:
        work: f32[64 * (2 width + 16)], a half-transformed group; a byte may hold two codes.
        group: f32[128 * width], a zero-padded copy of the last group of a tensor, and copies of single rows.
        row: u16[2 width], sums of one row.
        blank: u8[2 width], codes of a row of zeros.
        codes: u8[128 * width], codes of 4 bits that are still, or again, a byte each.
        addresses, keys: i64[64] and u32[8], what is known of the rows at hand.
        readings: u32[64, 4], how the codes of the rows at hand are read (``codec.decode``).
        signs: u32[4 width], of a group (``hashing.write_signs``).
        columns, columns_out: u16[2 width], parts of the columns in rounding offsets, of contributions and of results.
        exact: i32[2 width], sums of one row less their offsets.
        lanes: u32[16], what is known of each lane of a vector.
    """

    work: NDArray[np.float32]
    group: NDArray[np.float32]
    row: NDArray[np.uint16]
    blank: NDArray[np.uint8]
    codes: NDArray[np.uint8]
    addresses: NDArray[np.int64]
    keys: NDArray[np.uint32]
    readings: NDArray[np.uint32]
    signs: NDArray[np.uint32]
    columns: NDArray[np.uint16]
    columns_out: NDArray[np.uint16]
    exact: NDArray[np.int32]
    lanes: NDArray[np.uint32]


def _zeros(shape: int | tuple[int, ...], kind: type[np.generic]) -> NDArray[Any]:
    """Zeros at the beginning of a line of the caches: a vector that lies across two costs twice as much."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    memory = np.zeros(size + _LINE, np.uint8)
    first = -memory.ctypes.data % _LINE
    return memory[first : first + size].view(kind).reshape(shape)


def _memory(width: int) -> Memory:
    """For rows of up to ``width`` bytes."""
    made = Memory(
        work=_zeros(GROUP_ROWS * (2 * width + PITCH_EXTRA), np.float32),
        group=_zeros(GROUP_ROWS * 2 * width, np.float32),
        row=_zeros(2 * width, np.uint16),
        blank=_zeros(2 * width, np.uint8),
        codes=_zeros(GROUP_ROWS * 2 * width, np.uint8),
        addresses=_zeros(GROUP_ROWS, np.int64),
        keys=_zeros(8, np.uint32),
        readings=_zeros((GROUP_ROWS, 4), np.uint32),
        signs=_zeros(4 * width, np.uint32),
        columns=_zeros(2 * width, np.uint16),
        columns_out=_zeros(2 * width, np.uint16),
        exact=_zeros(2 * width, np.int32),
        lanes=_zeros(16, np.uint32),
    )
    made.blank[:] = ZERO
    return made


load_memory = loader(_memory(WIDTH_STEP))


class Scratch:
    """Working memory for rows of up to ``width`` bytes; about 1.5 MB at 1408. Not to be shared between threads.

    Attributes:
        memory: of compiled passes.
        memory_at: where its words are (``codec.laid``).
        call, call_at: words of the call at hand, and where they are.
        counts: what a pass has counted.

    Raises:
        ConfigError: ``width`` is not a positive multiple of 64.
    """

    def __init__(self, width: int) -> None:
        if width < WIDTH_STEP or width % WIDTH_STEP:
            raise ConfigError(f"width {width} does not fit the codec: give a positive multiple of {WIDTH_STEP}")
        self.width = width
        self.memory = _memory(width)
        self.memory_at = words_at(self.memory)
        self.call = Words()
        self.call_at = ctypes.addressof(self.call)
        self.counts = np.zeros(5, np.int64)

    @property
    def scratch(self) -> Scratch:
        """As of ``codec.threads.Threads``: this one, for a thread alone."""
        return self

    def run(self, code: Callable[[int, int, int, int], int], at: int, end: int, unit: int = 1) -> int:
        """See ``codec.threads.Threads.run``."""
        return code(at, 0, end, self.memory_at)


def readonly(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view, so that compiled functions see one type whether or not the caller may write."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view
