"""The owner's pass: sums of codes into means, coded again with a scale of each row's own.

All arithmetic before the last rounding is in integers: with d = sum - 128 units, the mean is
d * (2^(e/4) / 127) / count and the row's scale t = max|d| * (2^(e/4) / 127) / count, so the code of an entry is
floor(d * 127 / max|d| + 128 + u), which knows neither e nor count.

Lane order of the sums ring: per 8 codes two u64, codes 0 2 4 6 and then codes 1 3 5 7 as u16 lanes. Work stays in that
order (rounding offsets are numbered by lane), and codes are put back in order at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec import hashing, kernels, planes
from tailbound.codec.hashing import row_key
from tailbound.codec.scale import SPAN, ZERO, scale_of
from tailbound.codec.scratch import Scratch, readonly
from tailbound.wire.check import partial
from tailbound.wire.jit import compiled
from tailbound.wire.schema import EXPONENT_NONE, HEADER_BYTES


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
def _needs(slots, seq0, mask, cookie, op, groups, own_present, own_need, need):  # type: ignore[no-untyped-def]
    """Largest need over the owner's rows of each group, own included; EXPONENT_NONE where nobody had anything."""
    for i in range(groups.shape[0]):
        need[groups[i]] = EXPONENT_NONE
    for i in range(groups.shape[0]):
        g = groups[i]
        if own_present and own_need[g] > need[g]:
            need[g] = own_need[g]
        at = (seq0 + i) & mask
        if slots[at].cookie == cookie and slots[at].op == op and slots[at].need > need[g]:
            need[g] = slots[at].need


@compiled
def _mean_rows(  # type: ignore[no-untyped-def]
    sums, slots, seq0, cookie, op, groups, lo, hi, codes, own, own_present, own_exponents, own_need, own_shift,
    expected, headroom, rounding, out, scale, count, e_next, partials, usable, need, row, bits,
):  # fmt: skip
    span = SPAN if bits == 8 else planes.zero_of(bits) - 1
    mask = sums.shape[0] - 1
    rows = kernel = own_only = missing = mismatched = 0
    contributions = np.int64(0)
    _needs(slots, seq0, mask, cookie, op, groups, own_present, own_need, need)
    sums_at = np.int64(sums.ctypes.data)
    own_at = np.int64(own.ctypes.data) + HEADER_BYTES
    for i in range(lo, hi):
        g = groups[i]
        at = (seq0 + i) & mask
        e = np.int64(expected[g])
        if e == EXPONENT_NONE and own_present:
            e = np.int64(own_exponents[g])
        n = np.int64(0)
        units = np.int64(0)
        if slots[at].cookie == cookie and slots[at].op == op and slots[at].count > 0:
            if e == EXPONENT_NONE or slots[at].exponent == e:
                e = np.int64(slots[at].exponent)
                n = np.int64(slots[at].count)
                units = np.int64(slots[at].units)
                kernel += 1
            else:
                mismatched += 1
        peers = n > 0
        with_own = own_present and own_exponents[g] != EXPONENT_NONE and own_exponents[g] == e
        if with_own:
            own_only += n == 0
            n += 1
            units += np.int64(1) << np.int64(own_shift[g])
        e_next[i] = e if need[g] == EXPONENT_NONE else need[g] + headroom
        count[i] = n
        usable[i] = n > 0
        if n == 0:
            missing += 1
            scale[i] = np.float32(0.0)
            continue
        rows += 1
        contributions += n
        zero = np.uint32(ZERO * units)
        sum_at = sums_at + at * sums.shape[1]
        code_at = own_at + i * own.shape[1]
        target = out[i, HEADER_BYTES : HEADER_BYTES + codes]
        if bits != 8:
            own_row = own[min(i, own.shape[0] - 1), HEADER_BYTES:]
            key = row_key(rounding, np.uint32(i))
            most = planes.average_row(
                sums[at], sum_at, own_row, code_at, peers, with_own, np.uint16(own_shift[g]), units, codes, bits, key,
                row, target,
            )  # fmt: skip
            scale[i] = np.float32(np.float64(most) * (scale_of(e) / span) / np.float64(n))
            partials[i][:] = 0
            partial(target.view(np.uint64), partials[i])
            continue
        if peers and with_own:
            most = kernels.gather_both(sum_at, code_at, np.uint16(own_shift[g]), zero, codes, row)
        elif peers:
            most = kernels.gather_ring(sum_at, code_at, np.uint16(0), zero, codes, row)
        else:
            most = kernels.gather_own(sum_at, code_at, np.uint16(own_shift[g]), zero, codes, row)
        if most == 0:
            scale[i] = np.float32(0.0)
            target[:] = np.uint8(ZERO)
        else:
            scale[i] = np.float32(np.float64(most) * (scale_of(e) / SPAN) / np.float64(n))
            factor = np.float32(SPAN / np.float64(most))
            kernels.requantise(row, zero, factor, row_key(rounding, np.uint32(i)), codes, np.int64(target.ctypes.data))
        state = partials[i]
        state[:] = 0
        partial(target.view(np.uint64), state)
    return rows, kernel, own_only, missing, mismatched, contributions


def mean_rows(
    sums: NDArray[np.uint8],
    slots: NDArray[Any],
    seq0: int,
    cookie: int,
    op: int,
    groups: NDArray[np.int32],
    codes: int,
    own: NDArray[np.uint8],
    own_present: bool,
    own_exponents: NDArray[np.int16],
    own_need: NDArray[np.int16],
    own_shift: NDArray[np.uint8],
    expected: NDArray[np.int16],
    headroom: int,
    seed: int,
    rank: int,
    out: NDArray[np.uint8],
    scale: NDArray[np.float32],
    count: NDArray[np.uint16],
    e_next: NDArray[np.int16],
    partials: NDArray[np.uint64],
    usable: NDArray[np.uint8],
    need: NDArray[np.int16],
    scratch: Scratch,
    *,
    places: tuple[int, int] | None = None,
    bits: int = 8,
) -> Means:
    """Averages the rows of one owner and codes them for the way back (codec-10).

    A row's sum is taken when its record carries (cookie, op) and the expected exponent; else the own row stands alone.

    Args:
        sums: u8[sum_rows, 2 W], sum_rows a power of two; read only. Sealed: nobody adds any more.
        slots: [sum_rows] of ``tb_slot``; read only.
        seq0: row sequence of the owner's first row in this op.
        groups: i32[n], group of each row in place order (``Placement.groups_of(rank)``).
        codes: bytes of codes a row (V at 8 bits).
        own: u8[n, 64 + V], own contribution packets in place order (a slice of ``packets``).
        own_present: the own bucket was coded; else ``own*`` are not read.
        own_exponents, own_need, own_shift: [G], what ``encode`` was given and what it said.
        expected: i16[G], e that contributions must carry; EXPONENT_NONE: unknown, the own one decides, else the
            record's.
        headroom: h (``scale.headroom_of``).
        seed: ``hashing.seed_of(cookie, op)``; with ``rank`` it seeds the rounding.
        out: u8[n, 64 + V], written: codes; headers are left alone.
        scale: f32[n], written: largest absolute value of the row.
        count: u16[n], written: contributors; 0: the row is missing and must not be sent.
        e_next: i16[n], written: e of the row's group for the key's next op; EXPONENT_NONE: nothing known.
        partials: u64[n, 4], written: ``wire.check`` state over the payload.
        usable: u8[n], written: 1 where there is a result to send.
        need: i16[G], working memory: largest need a group.
        places: only the rows of this half-open range of places (``e_next`` still looks at all records).
        bits: of a code; at 4, sums are u8 lanes (``codec.planes``).

    Returns:
        Counts over the rows made.

    Raises:
        ValueError: an array does not fit.
    """
    n = groups.shape[0]
    stride = HEADER_BYTES + codes
    if out.shape != (n, stride) or (own_present and own.shape != (n, stride)) or partials.shape != (n, 4):
        raise ValueError(f"{n} rows of {codes} codes do not fit out {out.shape}, own {own.shape} or {partials.shape}")
    if 2 * codes > sums.shape[1] or codes > scratch.width or n > sums.shape[0]:
        raise ValueError(f"{n} rows of {codes} codes do not fit sums {sums.shape} or a scratch for {scratch.width}")
    lo, hi = places or (0, n)
    rounding = np.uint32(hashing.rounding_seed(seed, rank, hashing.STAGE_RESULT))
    return Means(
        *_mean_rows(
            readonly(sums), readonly(slots), np.int64(seq0), np.uint32(cookie), np.uint32(op), readonly(groups), lo, hi,
            codes, own, own_present, own_exponents, own_need, own_shift, expected, headroom, rounding, out, scale,
            count, e_next, partials, usable, need, scratch.row, bits,
        )
    )  # fmt: skip
