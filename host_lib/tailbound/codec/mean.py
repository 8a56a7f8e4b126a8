"""The owner's pass: sums of codes into means, coded again with a scale of each row's own.

All arithmetic before the last rounding is in integers: with d = sum - 128 units less the rounding offsets, the mean is
d * (2^(e/4) / 127) / count and the row's scale t = max|d| * (2^(e/4) / 127) / count, so the code of an entry is
floor(d * 127 / max|d| + 128 + u), which knows neither e nor count.

Rounding by floor(y + u) leaves the variance f (1 - f) for a y with the fraction f, 1/6 on average; with u - 1/2 taken
off again it is 1/12 for every y (subtractive dither: Roberts 1962, Schuchman 1964). The sum of the offsets of all N
ranks takes no loop over them (``codec.hashing``); where some are missing, theirs are put back, or those of the few that
are there taken off one by one. Both are unbiased, taken off or not, so a row may be left as it is:

- groups that are not rotated, so that what is exactly zero on all ranks stays so;
- rows in which more than half of the sums are zero, such as those of a group with few columns that are not: there the
  rounding of the others is the smaller error. Even columns decide on odd ones and odd ones on even ones, because what
  decides on an offset must not depend on it (offsets of different columns are independent);
- rows in which a rank is shifted (units other than the count): whose offset counts how often is not known.

The result's offset is left to whoever decodes; a negative scale says so.

Lane order of the sums ring: per 8 codes two u64, codes 0 2 4 6 and then codes 1 3 5 7 as u16 lanes. Work stays in that
order, and codes are put back in order at the end. Results of contributions of 4 bits have 8.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec import hashing, kernels, planes
from tailbound.codec.format import HALVES, PLANES, CodeFormat
from tailbound.codec.hashing import row_key, write_lanes
from tailbound.codec.records import Coding, Own, Results, Sums
from tailbound.codec.scale import SPAN, ZERO, next_exponent, scale_of
from tailbound.codec.scratch import Scratch, readonly
from tailbound.codec.shape import GROUP_ROWS, Groups, Shape
from tailbound.codec.simd import LANES
from tailbound.codec.threads import Threads
from tailbound.wire.jit import compiled
from tailbound.wire.proof import absorb
from tailbound.wire.schema import EXPONENT_NONE, HEADER_BYTES


class _Form(NamedTuple):
    """Of an op, for the compiled pass."""

    layout: Groups
    codes: int  #: bytes of a row of contributions
    entries: int  #: of a row
    code: CodeFormat  #: of contributions
    headroom: int
    shift_cap: int  #: of contributions
    contributed: np.uint32  #: seed of the rounding offsets of contributions
    rounding: np.uint32  #: of results
    rank: int
    ranks: int
    steps: int  #: of all ranks, in their offsets
    subtract: bool
    key: NDArray[np.uint64]  #: of the check or tag


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
def _needs(sums, own, group_of):  # type: ignore[no-untyped-def]
    """Largest need over the owner's rows of each group, own included; EXPONENT_NONE where no rank had anything."""
    slots, most, mask = sums.slots, own.most, sums.rows.shape[0] - 1
    for k in own.rows:
        most[group_of[k]] = EXPONENT_NONE
    for i in range(own.rows.shape[0]):
        g = group_of[own.rows[i]]
        if own.present and own.scales.need[g] > most[g]:
            most[g] = own.scales.need[g]
        at = (sums.seq0 + i) & mask
        if slots[at].cookie == sums.cookie and slots[at].op == sums.op and slots[at].need > most[g]:
            most[g] = slots[at].need


@compiled
def _bitmap(slot, peers):  # type: ignore[no-untyped-def]
    """The ranks of a slot; no rank without ``peers``."""
    ranks, none = slot.ranks, np.uint64(0)
    return (ranks[0], ranks[1], ranks[2], ranks[3]) if peers else (none, none, none, none)


@compiled
def _even(lane):  # type: ignore[no-untyped-def]
    return lane & 4 == 0


@compiled
def _zeros(counts, most, entries):  # type: ignore[no-untyped-def]
    """Sums of a row that are zero, in even columns and in odd ones, of those of each lane, which are ``most`` at most.

    0 if they are few in any case.
    """
    even = odd = 0
    if LANES * np.int64(most) <= entries // 2:
        return even, odd
    for lane in range(LANES):
        if _even(lane):
            even += counts[lane]
        else:
            odd += counts[lane]
    return even, odd


@compiled
def _take_off(row, zero, entries, k, members, form, memory):  # type: ignore[no-untyped-def]
    """Sums of row ``k`` less the offsets of its members, in lanes as ``memory.lanes`` says; returns the largest one.

    ``members``: how many, their bitmap, and whether that lacks the own rank.
    """
    exact, columns, masks = memory.exact, memory.columns, memory.lanes
    count, bitmap, own = members
    key = row_key(form.contributed, k)
    few = 2 * count < form.ranks
    same = np.int64(0 if few else form.steps) - 32768 * count
    of_all = np.int64(key), np.int64(0 if few else form.ranks), same
    most = kernels.take_off(row, zero, of_all, columns, masks, entries, exact)
    if count == form.ranks:
        return most
    for rank in range(form.ranks):
        here = bitmap[rank >> 6] >> np.uint64(rank & 63) & np.uint64(1) != 0 or (own and rank == form.rank)
        if here == few:
            step = np.uint32((rank << 16) // form.ranks)
            sign = np.int32(-1 if few else 1)
            most = kernels.add_offsets(exact, np.uint32(key + step), sign, columns, masks, entries)
    return most


@compiled
def _rounded(row, zero, k, members, zeros, subtract, form, memory, target):  # type: ignore[no-untyped-def]
    """Codes a row of sums of 8 or 4 bits; returns its largest one in units of 2^-16, and whether offsets are left.

    ``zeros``: the most in one of ``memory.lanes``. ``subtract``: offsets may be taken off.
    """
    entries = np.int64(form.entries)
    even, odd = _zeros(memory.lanes, zeros, entries)
    known = subtract and zero == form.code.zero * members[0]  # no rank is shifted
    of_even, of_odd = known and 2 * odd <= entries // 2, known and 2 * even <= entries // 2
    for lane in range(LANES):
        memory.lanes[lane] = 0xFFFFFFFF if (of_even if _even(lane) else of_odd) else 0
    most = np.int64(_take_off(row, zero, entries, k, members, form, memory))
    factor = np.float32(SPAN / np.float64(most)) if most > 0 else np.float32(0.0)
    key, columns = row_key(form.rounding, k), memory.columns_out
    if most == 0:
        target[:] = np.uint8(ZERO)
    else:
        at = np.int64(target.ctypes.data)
        kernels.requantise(memory.exact, factor, np.float32(SPAN), key, columns, entries, at)
    return most, subtract and 2 * (even + odd) <= entries


@compiled
def _mean_rows(sums, own, lo, hi, form, out, memory):  # type: ignore[no-untyped-def]
    codes, slots, scales, row = form.codes, sums.slots, own.scales, memory.row
    span = form.code.span
    mask = sums.rows.shape[0] - 1
    rows = kernel = own_only = missing = mismatched = 0
    contributions = np.int64(0)
    _needs(sums, own, form.layout.of)
    entries, columns_out = form.entries, memory.columns_out
    write_lanes(form.contributed, memory.columns[:entries])
    write_lanes(form.rounding, columns_out[:entries])
    sums_at = np.int64(sums.rows.ctypes.data)
    own_at = np.int64(own.packets.ctypes.data) + HEADER_BYTES
    for i in range(lo, hi):
        k = own.rows[i]
        g = form.layout.of[k]
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
        out.exponent_next[i] = next_exponent(e, own.most[g], form.headroom, form.shift_cap)
        out.contributors[i] = n
        out.usable[i] = n > 0
        if n == 0:
            missing += 1
            out.scale[i] = np.float32(0.0)
            continue
        rows += 1
        contributions += n
        zero = np.uint32(form.code.zero * units if form.code.packing != PLANES else 0)
        shift, zeros = np.uint16(scales.shift[g]), np.uint32(0)
        sum_at = sums_at + at * sums.rows.shape[1]
        code_at = own_at + i * own.packets.shape[1]
        target = out.packets[i, HEADER_BYTES:]
        lanes = codes  # in planes two of an entry
        if form.code.packing == HALVES:
            lanes, code_at = entries, np.int64(memory.codes.ctypes.data)
            if with_own:
                planes.unpack(own.packets[i, HEADER_BYTES : HEADER_BYTES + codes], memory.codes[:entries])
        if peers and with_own:
            zeros = kernels.gather_both(sum_at, code_at, shift, zero, lanes, row, memory.lanes)
        elif peers:
            zeros = kernels.gather_ring(sum_at, code_at, shift, zero, lanes, row, memory.lanes)
        else:
            zeros = kernels.gather_own(sum_at, code_at, shift, zero, lanes, row, memory.lanes)
        unit, left = 1.0, False
        if form.code.packing == PLANES:
            most = np.int64(planes.requantise16(row, units, entries, row_key(form.rounding, k), columns_out, target))
        else:
            members = n, _bitmap(slots[at], peers), with_own
            turned = form.subtract and form.layout.rows[g + 1] - form.layout.rows[g] > 1
            most, left = _rounded(row, zero, k, members, zeros, turned, form, memory, target)
            unit = 2.0**-16
        scale = np.float32(np.float64(most) * (scale_of(e) / span) / np.float64(n) * unit)
        out.scale[i] = -scale if left and most > 0 else scale
        state = out.partials[i]
        state[:] = 0
        absorb(target.view(np.uint64), state, form.key)
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
        sums: read.
        own: read, but for the working memory.
        coding: how the ranks code.
        out: written.
        places: only the rows of this half-open range of places (``exponent_next`` still looks at all records).

    Returns:
        Counts over the rows made.

    Raises:
        ValueError: an array does not fit.
    """
    n, codes, made = own.rows.shape[0], shape.codes, shape.results
    fits = out.packets.shape == (n, HEADER_BYTES + made.codes) and out.partials.shape == (n, 4)
    if not fits or (own.present and own.packets.shape != (n, HEADER_BYTES + codes)):
        raise ValueError(
            f"{n} rows of {codes} codes do not fit out {out.packets.shape}, own {own.packets.shape} or "
            f"{out.partials.shape}"
        )
    if (
        2 * shape.code.lanes_a_byte * codes > sums.rows.shape[1]
        or max(codes, made.codes) > scratch.width
        or n > sums.rows.shape[0]
    ):
        raise ValueError(
            f"{n} rows of {codes} codes do not fit sums {sums.rows.shape} or a scratch for {scratch.width}"
        )
    lo, hi = places or (0, n)
    contributed = np.uint32(hashing.rounding_seed(coding.seed, hashing.STAGE_CONTRIBUTION))
    rounding = np.uint32(hashing.rounding_seed(coding.seed, hashing.STAGE_RESULT))
    sealed = Sums(
        readonly(sums.rows), readonly(sums.slots), int(sums.seq0), int(sums.cookie), int(sums.op), sums.expected
    )
    own = Own(readonly(own.rows.view(np.int32)), own.packets, own.present, own.scales, own.most)
    form = _Form(
        shape.layout, codes, shape.entries, shape.code, coding.headroom,
        0 if shape.code.clips else coding.shift_cap, contributed, rounding, coding.rank, coding.ranks,
        hashing.steps_of_all(coding.ranks), coding.rotate and shape.code.offsets, coding.key,
    )  # fmt: skip
    return Means(*_mean_rows(sealed, own, lo, hi, form, out, scratch.memory))


def mean_by(threads: Threads, sums: Sums, own: Own, shape: Shape, coding: Coding, out: Results) -> Means:
    """``mean_rows`` of all rows, shared by ``threads`` in blocks of as many rows as a group has; the same bits.

    Raises:
        ValueError: an array does not fit.
    """
    rows = own.rows.shape[0]

    def part(scratch: Scratch, blocks: tuple[int, int]) -> Means:
        places = blocks[0] * GROUP_ROWS, min(blocks[1] * GROUP_ROWS, rows)
        apart = own._replace(most=own.most.copy())  # every part looks at all records anew
        return mean_rows(sums, apart, shape, coding, out, scratch, places=places)

    return Means(*map(sum, zip(*threads.each(-(-rows // GROUP_ROWS), part), strict=True)))
