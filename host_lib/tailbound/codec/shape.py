"""How a bucket is cut into rows (codec-1): tensors begin new rows, rows form groups, a row has V codes.

Rotation spreads the error of a group evenly over its entries, so a group holds rows of one tensor only, and each tensor
keeps its own precision. The rows of a tensor are cut into groups of 64, then of 32, 16, ... 1 rows, largest first. An
op whose tensors are not known has groups of R rows. Rows are shortened rather than padded where all are short.
The shape is a function of (numel, width, bits, tensors) alone and part of the layout tag.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.format import FORMATS, CodeFormat
from tailbound.codec.laid import laid
from tailbound.errors import ConfigError
from tailbound.wire.bits import Bits, both_ways
from tailbound.wire.schema import ROW_STEP, WIDTH_STEP

#: Rows rotated together: at most, and at least where tensors are not known.
GROUP_ROWS = 64
GROUP_ROWS_LEAST = 16
#: Number of the codec: raised when codes mean something else. Ranks of another one are refused by name.
CODEC_NUMBER = 5
#: Hash indices are 32 bits; a larger bucket would repeat its signs.
NUMEL_MOST = 1 << 31
#: Small neighbours share rows where a row each would add more than so many rows, and more than this part of all.
_PADDING_ROWS, _PADDING_PART = 64, 1 / 50


@laid
class Groups(NamedTuple):
    """The groups of an op, as compiled passes take them.

    Attributes:
        rows: i64[G + 1], the first row of each group; the last one is T.
        entries: i64[G + 1], the first entry of each group; the last one is numel.
        of: i32[T], the group of each row.
    """

    rows: NDArray[np.int64]
    entries: NDArray[np.int64]
    of: NDArray[np.int32]


#: One of the type, for ``codec.loader``.
NO_GROUPS = Groups(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int32))


def row_entries(width: int, bits: Bits) -> int:
    """Entries of a row at most, on a path that takes ``width`` bytes a packet: results have 8 bits at least."""
    return width * 8 // both_ways(bits)[1]


@dataclass(frozen=True)
class Shape:
    """Shape of one op.

    ``numel`` entries, ``width`` the widest row W the path takes in bytes, ``group_rows`` R of an op whose tensors are
    not known (64, 32 or 16), ``codes`` bytes of a contribution's codes a row, a multiple of 16, ``bits`` of such a
    code, ``runs`` the entries of each tensor, or of small ones that share rows; none: they are not known.
    """

    numel: int
    width: int
    group_rows: int
    codes: int
    bits: int = 8
    runs: tuple[int, ...] = ()

    @property
    def code(self) -> CodeFormat:
        """What its bits imply."""
        return FORMATS[self.bits]

    @cached_property
    def results(self) -> Shape:
        """The same op as its results are shaped."""
        down = self.code.results
        return Shape(self.numel, self.width, self.group_rows, self.entries * down // 8, down, self.runs)

    @cached_property
    def entries(self) -> int:
        """V: entries a row, as many as there are codes."""
        return self.codes * 8 // self.bits

    @cached_property
    def layout(self) -> Groups:
        """Where its groups are."""
        if not self.runs:
            rows, begins = [self.group_rows] * self.groups, np.arange(self.groups) * self.group_rows * self.entries
        else:
            by_run = [group_sizes(-(-run // self.entries)) for run in self.runs]
            rows = [size for sizes in by_run for size in sizes]
            ends = np.cumsum([np.sum(sizes) for sizes in by_run])
            at = np.cumsum([0, *rows[:-1]])
            run = np.searchsorted(ends, at, "right")
            first_row, first_entry = np.append(0, ends[:-1]), np.cumsum([0, *self.runs[:-1]])
            begins = first_entry[run] + (at - first_row[run]) * self.entries
        of = np.repeat(np.arange(len(rows), dtype=np.int32), rows)
        found = Groups(np.cumsum([0, *rows]), np.append(begins, self.numel).astype(np.int64), of)
        for array in found:
            array.flags.writeable = False
        return found

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of its groups, each number once, rising."""
        found: list[int] = np.unique(np.diff(self.layout.rows)).tolist()
        return found

    @cached_property
    def groups(self) -> int:
        """G."""
        return len(self.layout.rows) - 1 if self.runs else -(-self.numel // (self.group_rows * self.entries))

    @cached_property
    def rows(self) -> int:
        """T."""
        return len(self.layout.of) if self.runs else self.groups * self.group_rows

    def __hash__(self) -> int:
        return self._hash  # shapes are keys of tables that every op looks into

    @cached_property
    def _hash(self) -> int:
        return hash((self.numel, self.width, self.group_rows, self.codes, self.bits, self.runs))


def group_sizes(rows: int) -> list[int]:
    """Rows of the groups of a tensor: 64 each, then powers of two, the largest first."""
    rest = [1 << bit for bit in range(5, -1, -1) if rows >> bit & 1]
    return [GROUP_ROWS] * (rows // GROUP_ROWS) + rest


@lru_cache(maxsize=4096)
def shape_for(numel: int, width: int, bits: Bits = 8, tensors: tuple[int, ...] = ()) -> Shape:
    """The shape of a bucket of ``numel`` entries in codes of ``bits`` on a path that takes ``width`` bytes a packet.

    Args:
        tensors: entries of each tensor in it, in order; none: they are not known.

    Raises:
        ConfigError: ``numel`` is not in 1..2**31, ``width`` is not a positive multiple of 64, or ``bits`` not in BITS.
    """
    if not 1 <= numel <= NUMEL_MOST:
        raise ConfigError(f"a bucket of {numel} entries cannot be coded: use 1 to {NUMEL_MOST} entries")
    if width < WIDTH_STEP or width % WIDTH_STEP:
        raise ConfigError(f"width {width} does not fit the codec: give a positive multiple of {WIDTH_STEP}")
    up, _ = both_ways(bits)
    most = row_entries(width, bits)
    step = max(ROW_STEP, ROW_STEP * 8 // up)  # whole rows of bytes, and whole vectors of entries
    if tensors:
        runs = tuple(_runs(tensors, most))
        longest = max(-(-run // -(-run // most)) for run in runs)  # of a row, where each run has as few as it can
        return Shape(numel, width, GROUP_ROWS, step * -(-longest // step) * up // 8, up, runs)
    packets = -(-numel // most)
    group_rows = GROUP_ROWS
    while group_rows > GROUP_ROWS_LEAST and packets <= group_rows // 2:
        group_rows //= 2
    groups = -(-numel // (group_rows * most))
    entries = min(most, step * -(-numel // (step * groups * group_rows)))
    return Shape(numel, width, group_rows, entries * up // 8, up)


def _runs(tensors: tuple[int, ...], most: int) -> Iterable[int]:
    """Entries of what begins new rows of ``most`` entries: tensors, unless that costs too many rows.

    Then neighbours that fit one row together share it.
    """
    least = -(-sum(tensors) // most)
    added = sum(-(-size // most) for size in tensors) - least
    if added <= max(_PADDING_ROWS, _PADDING_PART * least):
        return tensors
    runs = [tensors[0]]
    for size in tensors[1:]:
        if runs[-1] + size <= most:
            runs[-1] += size
        else:
            runs.append(size)
    return runs


def cut_tensors(tensors: tuple[int, ...], entries: int, rows_most: int, groups_most: int) -> Iterator[tuple[int, ...]]:
    """Entries of the tensors, or parts of tensors, of each op of a bucket, in order.

    Args:
        tensors: entries of each tensor in the bucket.
        entries: of a row.
        rows_most: of an op.
        groups_most: of an op.
    """
    total = sum(-(-size // entries) for size in tensors)
    even = -(-total // -(-total // rows_most))
    rows_most = min(rows_most, even + -even % GROUP_ROWS)  # ops of equal size
    op: list[int] = []
    rows = groups = 0
    for size in tensors:
        left = size
        while left:
            took = min(-(-left // entries), rows_most - rows)
            if took == 0 or groups + len(group_sizes(took)) > groups_most:
                if op:
                    yield tuple(op)
                    op, rows, groups = [], 0, 0
                    continue
                took = min(took, GROUP_ROWS * groups_most) // GROUP_ROWS * GROUP_ROWS or 1 << took.bit_length() - 1
            part = min(left, took * entries)
            op.append(part)
            left, rows, groups = left - part, rows + took, groups + len(group_sizes(took))
    yield tuple(op)


def layout_tag(
    *, bucket: int, whole: int, numel: int, dtype: str, chunk: int, world_size: int, width: int, mode: int,
    last: bool, runs: tuple[int, ...] = (),
) -> int:  # fmt: skip
    """16-bit tag of everything ranks must agree on before their packets mean the same; stable across processes.

    ``CODEC_NUMBER`` is in it.

    Args:
        bucket: index of the bucket in the step.
        whole: entries of the bucket.
        numel: entries of the chunk that is one op.
        dtype: name of the bucket's type, as ``"float32"``.
        chunk: index of the chunk in the bucket.
        world_size: ranks of the job.
        width: widest row W.
        mode: number of the codec mode (rotation, bits).
        last: whether it ends the step.
        runs: of its shape.
    """
    text = f"{bucket}/{whole}/{numel}/{dtype}/{chunk}/{world_size}/{width}/{mode}/{last}/{CODEC_NUMBER}/{runs}"
    return int.from_bytes(blake2b(text.encode(), digest_size=2).digest(), "little")
