"""What the passes of the codec are given: how an op is coded, and memory that belongs together.

T is the rows of the op, G its groups, V the bytes of a row's codes, n the rows of one owner.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.laid import laid
from tailbound.codec.scale import Weights
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import HEADER_BYTES
from tailbound.wire.tag import NO_KEY

#: ``Received.counts`` of means.
NO_COUNTS: NDArray[np.uint16] = np.zeros(0, np.uint16)


class Coding(NamedTuple):
    """How one rank codes one op.

    Attributes:
        seed: ``hashing.seed_of(cookie, op)``.
        weights: what sums of the job have room for; None where a switch sums: ranks have agreed on scales.
        rotate: whether groups are rotated; without it y is x.
        key: what packets are tagged with (``wire.tag``); empty: they carry the check.
    """

    seed: int
    weights: Weights | None = None
    rotate: bool = True
    key: NDArray[np.uint64] = NO_KEY


@laid
class Packets(NamedTuple):
    """Memory of an op's contributions.

    Attributes:
        memory: u8[T, 64 + V], C-contiguous; codes lie in columns 64 and up, headers are left alone.
        position: i32[T], packet position of row k (``Placement.position``).
        partials: u64[T, 4], by packet position: ``wire.proof`` state over the payload.
    """

    memory: NDArray[np.uint8]
    position: NDArray[np.int32]
    partials: NDArray[np.uint64]


@laid
class Scales(NamedTuple):
    """What a rank's codes mean, by group.

    Attributes:
        exponents: i16[G], e; given where a switch sums, else written.
        need: i16[G], ceil(4 log2 max|y|), EXPONENT_NONE where all is zero; written where a switch sums.
        weights: u8[G], m, written.
    """

    exponents: NDArray[np.int16]
    need: NDArray[np.int16]
    weights: NDArray[np.uint8]


@laid
class Ring(NamedTuple):
    """Where the kernel sums contributions.

    Attributes:
        rows: u8[sum_rows, 2 W], sum_rows a power of two; read only.
        slots: [sum_rows] of ``tb_slot``; read only.
    """

    rows: NDArray[np.uint8]
    slots: NDArray[Any]


class Sums(NamedTuple):
    """What the kernel has made of the contributions to an owner's rows; sealed: nobody adds any more.

    Attributes:
        ring: where.
        seq0: row sequence of the owner's first row in this op.
        cookie, op: what a slot must carry to count.
    """

    ring: Ring
    seq0: int
    cookie: int
    op: int


@laid
class Own(NamedTuple):
    """The rows of an owner, and what it contributes to them itself.

    Attributes:
        rows: i32[n] or u32[n], which row k of the op each is, in place order (``Placement.rows_of``).
        packets: u8[n, 64 + V], own contributions in place order.
        present: the own bucket was coded; else ``packets`` and ``scales`` are not read.
        scales: what ``encode`` said.
    """

    rows: NDArray[np.integer[Any]]
    packets: NDArray[np.uint8]
    present: bool
    scales: Scales


@laid
class Results(NamedTuple):
    """Means of an owner's rows as packets, and what their headers say.

    Attributes:
        packets: u8[n, 64 + V]: codes; headers are left alone.
        partials: u64[n, 4]: ``wire.proof`` state over the payload.
        scale: f32[n]: largest absolute value of the row; negative: whoever decodes subtracts the rounding offsets.
        contributors: u16[n]: how many ranks are in the row; 0: the row is missing and must not be sent.
        usable: u8[n]: 1 where there is a result to send.
    """

    packets: NDArray[np.uint8]
    partials: NDArray[np.uint64]
    scale: NDArray[np.float32]
    contributors: NDArray[np.uint16]
    usable: NDArray[np.uint8]


@laid
class Received(NamedTuple):
    """Result rows of an op, where they lie.

    Attributes:
        ring: u8[result_rows, W], the result ring.
        own: u8[own rows, 64 + V], own result packets in place order.
        source: i64[T], of row k: a ring position, MISSING (-1), or ``decode.own_source(place)`` (<= -2).
        scale: f32[T], scale of row k, negative where rounding offsets are to be subtracted; not read where missing.
        counts: u16[T]: the ring holds sums of so many contributions, big-endian u16 lanes, as a switch sends them, and
            ``scale`` is that of the contributions. Empty: it holds mean codes.
    """

    ring: NDArray[np.uint8]
    own: NDArray[np.uint8]
    source: NDArray[np.int64]
    scale: NDArray[np.float32]
    counts: NDArray[np.uint16] = NO_COUNTS


def results(rows: int, codes: int) -> Results:
    """Zeroed memory for ``rows`` results of ``codes`` bytes."""
    return Results(
        np.zeros((rows, HEADER_BYTES + codes), np.uint8),
        np.zeros((rows, 4), np.uint64),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.uint16),
        np.zeros(rows, np.uint8),
    )


#: One of each type, for ``codec.loader``.
_BYTES = np.zeros((1, HEADER_BYTES), np.uint8)
NO_PACKETS = Packets(_BYTES, np.zeros(1, np.int32), np.zeros((1, 4), np.uint64))
NO_SCALES = Scales(np.zeros(1, np.int16), np.zeros(1, np.int16), np.zeros(1, np.uint8))
NO_RING = Ring(_BYTES, np.zeros(1, DTYPES["tb_slot"]))
NO_OWN = Own(np.zeros(1, np.int32), _BYTES, False, NO_SCALES)
NO_RESULTS = results(1, 0)
NO_RECEIVED = Received(_BYTES, _BYTES, np.zeros(1, np.int64), np.zeros(1, np.float32), NO_COUNTS)
