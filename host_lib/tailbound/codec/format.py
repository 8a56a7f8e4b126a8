"""What the bits of a code imply (codec-12): one object a width. Nothing else compares bits with numbers.

code = clamp(floor(y * span / scale + zero + u), zero - span, zero + span). The datapath sums bytes in u16 lanes, and
knows of packing alone:

- BYTES, 8 bits: a byte an entry.
- PLANES, 16 bits: V upper bytes, then V lower ones, each summed in lanes of their own; 256 * (sum of upper) + (sum of
  lower) is the sum of the codes. What float32 holds exactly beside the zero limits u to 8 bits. Rounding is 2^-15 of
  the scale there, and nobody takes offsets off.
- HALVES, 4 bits: V / 2 bytes, of every sixteen entries the first eight in the lower halves of eight bytes, the others
  in the upper ones. The datapath takes the halves apart (``Flag.HALVES``), as if each had a byte to itself. Codes are
  made and read as codes of 8 bits whose distance from zero is 7 at most. Results have 8 bits, so a row has no more
  entries than bytes fit a packet.

Another width of a known packing needs an object in ``FORMATS`` and a place in ``wire.bits.BITS``. A new packing needs
its lanes in the programs, too (``ebpf/lanes.h``, ``nibbles.h``, the branches of ``ingest.h`` by flag), a flag in
``wire.schema``, its place where codes are packed (``encode``, ``decode``, ``mean``, ``planes``, Triton's kernels), and
the reference in the tests. A width that does not divide 128 needs other steps in ``shape.shape_for``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.laid import laid
from tailbound.errors import ConfigError
from tailbound.wire.bits import Bits, both_ways
from tailbound.wire.schema import Flag

#: How codes lie in the bytes of a row.
BYTES, PLANES, HALVES = range(3)


@laid
class CodeFormat(NamedTuple):
    """Of one code, as compiled passes take it.

    Attributes:
        bits: of it.
        zero: code of the value 0.
        span: largest distance of a code from it.
        packing: BYTES, PLANES or HALVES.
        offsets: rounding offsets may be taken off sums and results.
        clips: codes end at some standard deviations (``planes.REACH``), and errors are fed back by default.
    """

    bits: int
    zero: int
    span: int
    packing: int
    offsets: bool
    clips: bool

    @property
    def results(self) -> int:
        """Bits of the results of contributions of this format."""
        return 8 if self.packing == HALVES else self.bits

    @property
    def lanes_a_byte(self) -> int:
        """Lanes of u16 in which a byte of codes is summed."""
        return 2 if self.packing == HALVES else 1

    @property
    def flags(self) -> int:
        """What headers say of it."""
        return Flag.HALVES if self.packing == HALVES else 0

    def zeros(self, size: int) -> NDArray[np.uint8]:
        """The bytes of a row of zeros."""
        low = {BYTES: 128, PLANES: 0, HALVES: 0x88}[self.packing]
        row = np.full(size, low, np.uint8)
        if self.packing == PLANES:
            row[: size // 2] = 128
        return row


FORMATS = {
    form.bits: form
    for form in (
        CodeFormat(16, 1 << 15, (1 << 15) - 1, PLANES, offsets=False, clips=False),
        CodeFormat(8, 1 << 7, (1 << 7) - 1, BYTES, offsets=True, clips=False),
        CodeFormat(4, 1 << 3, (1 << 3) - 1, HALVES, offsets=True, clips=True),
    )
}


def check_bits(bits: Bits, *, switched: bool = False) -> None:
    """Refuses codes that could not be summed.

    Raises:
        ConfigError: none of BITS; a switch, and other codes than bytes.
    """
    up, _ = both_ways(bits)
    if switched and FORMATS[up].packing != BYTES:
        raise ConfigError(f"a switch sums codes of 8 bits: give bits=8, not {bits}, or sum without a switch")
