"""The owner's pass: sums of codes into means, coded again with a scale of each row's own.

All arithmetic before the last rounding is in integers: with d = sum - 128 units, the mean is
d * (2^(e/4) / 127) / count and the row's scale t = max|d| * (2^(e/4) / 127) / count, so the code of an entry is
floor(d * 127 / max|d| + 128 + u), which knows neither e nor count.

Lane order of the sums ring: per 8 codes two u64, codes 0 2 4 6 and then codes 1 3 5 7 as u16 lanes. Work stays in that
order (rounding offsets are numbered by lane), and codes are put back in order at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tailbound.codec import hashing, kernels, planes
from tailbound.codec.hashing import row_key
from tailbound.codec.records import Coding, Own, Results, Sums
from tailbound.codec.scale import SPAN, ZERO, scale_of
from tailbound.codec.scratch import Scratch, readonly
from tailbound.codec.shape import Shape
from tailbound.wire.check import partial
from tailbound.wire.jit import compiled
from tailbound.wire.schema import EXPONENT_NONE, HEADER_BYTES


class _Form(NamedTuple):
    """Of an op, for the compiled pass."""

    codes: int  #: bytes of a row
    bits: int  #: of a code
    headroom: int
    rounding: np.uint32


class Means(NamedTuple):
    """What the rows of an owner were made of.

    ``rows`` made, ``kernel`` of them with contributions of peers, ``own_only`` without any, ``missing`` with no
    contributor at all, ``mismatched`` whose contributions had another scale and were discarded, ``contributions`` of
    all ranks together.
    """

    rows: int
    kernel: int
    own_only: int
    missing: int
    mismatched: int
    contributions: int


@compiled
def _needs(sums, own):  # type: ignore[no-untyped-def]
    """Largest need over the owner's rows of each group, own included; EXPONENT_NONE where nobody had anything."""
    slots, most, mask = sums.slots, own.most, sums.rows.shape[0] - 1
    for g in own.groups:
        most[g] = EXPONENT_NONE
    for i in range(own.groups.shape[0]):
        g = own.groups[i]
        if own.present and own.scales.need[g] > most[g]:
            most[g] = own.scales.need[g]
        at = (sums.seq0 + i) & mask
        if slots[at].cookie == sums.cookie and slots[at].op == sums.op and slots[at].need > most[g]:
            most[g] = slots[at].need


@compiled
def _mean_rows(sums, own, lo, hi, form, out, row):  # type: ignore[no-untyped-def]
    codes, slots, scales = form.codes, sums.slots, own.scales
    span = SPAN if form.bits == 8 else planes.zero_of(form.bits) - 1
    mask = sums.rows.shape[0] - 1
    rows = kernel = own_only = missing = mismatched = 0
    contributions = np.int64(0)
    _needs(sums, own)
    sums_at = np.int64(sums.rows.ctypes.data)
    own_at = np.int64(own.packets.ctypes.data) + HEADER_BYTES
    for i in range(lo, hi):
        g = own.groups[i]
        at = (sums.seq0 + i) & mask
        e = np.int64(sums.expected[g])
        if e == EXPONENT_NONE and own.present:
            e = np.int64(scales.exponents[g])
        n = np.int64(0)
        units = np.int64(0)
        if slots[at].cookie == sums.cookie and slots[at].op == sums.op and slots[at].count > 0:
            if e == EXPONENT_NONE or slots[at].exponent == e:
                e = np.int64(slots[at].exponent)
                n = np.int64(slots[at].count)
                units = np.int64(slots[at].units)
                kernel += 1
            else:
                mismatched += 1
        peers = n > 0
        with_own = own.present and scales.exponents[g] != EXPONENT_NONE and scales.exponents[g] == e
        if with_own:
            own_only += n == 0
            n += 1
            units += np.int64(1) << np.int64(scales.shift[g])
        out.exponent_next[i] = e if own.most[g] == EXPONENT_NONE else own.most[g] + form.headroom
        out.contributors[i] = n
        out.usable[i] = n > 0
        if n == 0:
            missing += 1
            out.scale[i] = np.float32(0.0)
            continue
        rows += 1
        contributions += n
        zero = np.uint32(ZERO * units if form.bits == 8 else 0)
        key = row_key(form.rounding, np.uint32(i))
        shift = np.uint16(scales.shift[g])
        sum_at = sums_at + at * sums.rows.shape[1]
        code_at = own_at + i * own.packets.shape[1]
        target = out.packets[i, HEADER_BYTES : HEADER_BYTES + codes]
        most = np.int64(0)
        if form.bits == 4:
            own_row = own.packets[min(i, own.packets.shape[0] - 1), HEADER_BYTES:]
            planes.gather4(sums.rows[at], own_row, peers, with_own, codes, row)
        elif peers and with_own:
            most = np.int64(kernels.gather_both(sum_at, code_at, shift, zero, codes, row))
        elif peers:
            most = np.int64(kernels.gather_ring(sum_at, code_at, shift, zero, codes, row))
        else:
            most = np.int64(kernels.gather_own(sum_at, code_at, shift, zero, codes, row))
        if form.bits != 8:
            most = np.int64(planes.requantise(row, units, codes, form.bits, key, target))
        elif most == 0:
            target[:] = np.uint8(ZERO)
        else:
            factor = np.float32(SPAN / np.float64(most))
            kernels.requantise(row, zero, factor, key, codes, np.int64(target.ctypes.data))
        out.scale[i] = np.float32(np.float64(most) * (scale_of(e) / span) / np.float64(n))
        state = out.partials[i]
        state[:] = 0
        partial(target.view(np.uint64), state)
    return rows, kernel, own_only, missing, mismatched, contributions


def mean_rows(
    sums: Sums,
    own: Own,
    shape: Shape,
    coding: Coding,
    out: Results,
    scratch: Scratch,
    *,
    places: tuple[int, int] | None = None,
) -> Means:
    """Averages the rows of one owner and codes them for the way back (codec-10).

    A row's sum is taken when its record carries (cookie, op) and the expected exponent; else the own row stands alone.

    Args:
        sums: read. At 4 bits sums are u8 lanes (``codec.planes``).
        own: read, but for the working memory.
        coding: its seed, rank and headroom.
        out: written.
        places: only the rows of this half-open range of places (``exponent_next`` still looks at all records).

    Returns:
        Counts over the rows made.

    Raises:
        ValueError: an array does not fit.
    """
    n, codes = own.groups.shape[0], shape.codes
    stride = HEADER_BYTES + codes
    fits = out.packets.shape == (n, stride) and out.partials.shape == (n, 4)
    if not fits or (own.present and own.packets.shape != (n, stride)):
        raise ValueError(
            f"{n} rows of {codes} codes do not fit out {out.packets.shape}, own {own.packets.shape} or "
            f"{out.partials.shape}"
        )
    if 2 * codes > sums.rows.shape[1] or codes > scratch.width or n > sums.rows.shape[0]:
        raise ValueError(
            f"{n} rows of {codes} codes do not fit sums {sums.rows.shape} or a scratch for {scratch.width}"
        )
    lo, hi = places or (0, n)
    rounding = np.uint32(hashing.rounding_seed(coding.seed, coding.rank, hashing.STAGE_RESULT))
    sealed = sums._replace(
        rows=readonly(sums.rows),
        slots=readonly(sums.slots),
        seq0=int(sums.seq0),
        cookie=int(sums.cookie),
        op=int(sums.op),
    )
    own = own._replace(groups=readonly(own.groups))
    form = _Form(codes, shape.bits, coding.headroom, rounding)
    return Means(*_mean_rows(sealed, own, lo, hi, form, out, scratch.memory.row))
