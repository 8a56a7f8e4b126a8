"""How a bucket is cut into rows (codec-1): groups of R rows, V codes a row.

Entry ``i`` of a bucket of ``numel`` float values lies in row ``k = i // V`` at column ``i % V``; row ``k`` is row
``k % R`` of group ``k // R``. A row is ``V * bits / 8`` bytes on the wire, with the bits of a contribution's code on
the way to its owner, and those of a result's on the way back. Rows are shortened rather than padded, so that at most
R * 16 entries of a group are padding (R * 32 at 4 bits). The shape is a function of (numel, width, bits) alone
and part of the layout tag.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b

from tailbound.errors import ConfigError
from tailbound.wire.bits import Bits, both_ways
from tailbound.wire.schema import ROW_STEP, WIDTH_STEP

#: Rows rotated together: at most, and at least.
GROUP_ROWS = 64
GROUP_ROWS_LEAST = 16
#: Number of the codec: raised when codes mean something else. Ranks of another one are refused by name.
CODEC_NUMBER = 3
#: Hash indices are 32 bits; a larger bucket would repeat its signs.
NUMEL_MOST = 1 << 31


def row_entries(width: int, bits: Bits) -> int:
    """Entries of a row at most, on a path that takes ``width`` bytes a packet: results have 8 bits at least."""
    return width * 8 // both_ways(bits)[1]


@dataclass(frozen=True)
class Shape:
    """Shape of one op.

    ``numel`` entries, ``width`` the widest row W the path takes in bytes, ``group_rows`` R (64, 32 or 16), ``groups``
    G, ``codes`` bytes of a contribution's codes a row, a multiple of 16, ``bits`` of such a code.
    """

    numel: int
    width: int
    group_rows: int
    groups: int
    codes: int
    bits: int = 8

    @cached_property
    def results(self) -> Shape:
        """The same op as its results are shaped."""
        down = max(self.bits, 8)
        return Shape(self.numel, self.width, self.group_rows, self.groups, self.entries * down // 8, down)

    @cached_property
    def entries(self) -> int:
        """V: entries a row, as many as there are codes."""
        return self.codes * 8 // self.bits

    @cached_property
    def rows(self) -> int:
        """T = G * R."""
        return self.groups * self.group_rows

    def __hash__(self) -> int:
        return self._hash  # shapes are keys of tables that every op looks into

    @cached_property
    def _hash(self) -> int:
        return hash((self.numel, self.width, self.group_rows, self.groups, self.codes, self.bits))


@lru_cache(maxsize=4096)
def shape_for(numel: int, width: int, bits: Bits = 8) -> Shape:
    """The shape of a bucket of ``numel`` entries in codes of ``bits`` on a path that takes ``width`` bytes a packet.

    Raises:
        ConfigError: ``numel`` is not in 1..2**31, ``width`` is not a positive multiple of 64, or ``bits`` not in BITS.
    """
    if not 1 <= numel <= NUMEL_MOST:
        raise ConfigError(f"a bucket of {numel} entries cannot be coded: use 1 to {NUMEL_MOST} entries")
    if width < WIDTH_STEP or width % WIDTH_STEP:
        raise ConfigError(f"width {width} does not fit the codec: give a positive multiple of {WIDTH_STEP}")
    up, _ = both_ways(bits)
    most = row_entries(width, bits)
    packets = -(-numel // most)
    group_rows = GROUP_ROWS
    while group_rows > GROUP_ROWS_LEAST and packets <= group_rows // 2:
        group_rows //= 2
    groups = -(-numel // (group_rows * most))
    step = max(ROW_STEP, ROW_STEP * 8 // up)  # whole rows of bytes, and whole vectors of entries
    entries = min(most, step * -(-numel // (step * groups * group_rows)))
    return Shape(numel, width, group_rows, groups, entries * up // 8, up)


def layout_tag(*, bucket: int, numel: int, dtype: str, chunk: int, world_size: int, width: int, mode: int) -> int:
    """16-bit tag of everything ranks must agree on before their packets mean the same; stable across processes.

    ``CODEC_NUMBER`` is in it.

    Args:
        bucket: index of the bucket in the step.
        numel: entries of the chunk that is one op.
        dtype: name of the bucket's type, as ``"float32"``.
        chunk: index of the chunk in the bucket.
        world_size: ranks of the job.
        width: widest row W.
        mode: number of the codec mode (rotation, bits).
    """
    text = f"{bucket}/{numel}/{dtype}/{chunk}/{world_size}/{width}/{mode}/{CODEC_NUMBER}"
    return int.from_bytes(blake2b(text.encode(), digest_size=2).digest(), "little")
