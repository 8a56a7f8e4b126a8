"""Counting over slot records and presence: who is in a row, which results are whole. One pass each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.records import Results
from tailbound.collective.known import Known
from tailbound.collective.op import Op
from tailbound.wire.jit import compiled
from tailbound.wire.schema import EXPONENT_NONE, Flag

_FORMS = int(Flag.SWITCHED | Flag.SUMS)


def summed_by(known: Known, op: Op) -> list[int]:
    """Own rows that hold a contribution, by rank."""
    records, out = known.records, np.zeros(known.ranks, np.int64)
    rows_by_rank(records.slots, op.sum_seq, op.own, records.sum_mask, known.cookie, op.label, out)
    counts: list[int] = out.tolist()
    return counts


def gather(known: Known, op: Op, by_owner: NDArray[np.int64]) -> int:
    """Notes in ``op.buffers.source`` which results are here; returns how many.

    Args:
        by_owner: i64[world], written: how many of whom.
    """
    place, presence = op.place, known.records.presence
    owner, source = place.placement.owner, op.buffers.source
    return int(gather_results(presence, place.result_seq, known.cookie, op.label, owner, known.rank, source, by_owner))


def flags_by(known: Known, op: Op) -> list[int]:
    """By rank, the header flags of its results that ``gather`` has found; -1: there are none."""
    found = np.empty(known.world, np.int64)
    gather_flags(known.records.results, op.buffers.source, op.label, op.place.placement.owner, found)
    flags: list[int] = found.tolist()
    return flags


@compiled
def rows_by_rank(
    slots: NDArray[Any], seq: int, rows: int, mask: int, cookie: int, op: int, out: NDArray[np.int64]
) -> None:
    """Counts into ``out`` i64[ranks] how many of an op's own rows hold a contribution of each rank."""
    out[:] = 0
    for i in range(rows):
        slot = slots[(seq + i) & mask]
        if slot.cookie != cookie or slot.op != op:
            continue
        for rank in range(out.shape[0]):
            out[rank] += (slot.ranks[rank >> 6] >> np.uint64(rank & 63)) & np.uint64(1)


@compiled
def gather_results(
    presence: NDArray[Any],
    seq: int,
    cookie: int,
    op: int,
    owner: NDArray[np.uint8],
    rank: int,
    source: NDArray[np.int64],
    by_owner: NDArray[np.int64],
) -> int:
    """Copies presence once: ``source[k]`` becomes the ring position of row k, or -1; own rows are left alone.

    Returns:
        Rows present; ``by_owner`` i64[ranks] says how many of each owner.
    """
    by_owner[:] = 0
    found, mask = 0, presence.shape[0] - 1
    for k in range(source.shape[0]):
        if owner[k] == rank:
            continue
        position = (seq + k) & mask
        here = presence[position].op == op and presence[position].cookie == cookie
        source[k] = position if here else -1
        if here:
            found += 1
            by_owner[owner[k]] += 1
    return found


@compiled
def read_records(
    records: NDArray[Any],
    source: NDArray[np.int64],
    op: int,
    scale: NDArray[np.float32],
    exponent: NDArray[np.int16],
    form: int,
    most: int,
    count: NDArray[np.uint16] | None,
) -> int:
    """Reads the scale, and of a switch the next exponent, of every row present in the ring (``source[k] >= 0``).

    A record whose op is another one was overwritten before use: its row is taken out (-1).

    Args:
        form: of a switch, ``Flag.SWITCHED`` or ``Flag.SUMS``: which one all rows must have; 0: of ranks, none of them.
        most: contributors at most.
        count: of a switch, written: contributors of every row; None: no switch.

    Returns:
        Rows overwritten, or not as they should be.
    """
    lost = 0
    for k in range(source.shape[0]):
        position = source[k]
        if position < -1:
            continue
        if count is not None:
            count[k], exponent[k] = 0, EXPONENT_NONE
        if position < 0:
            continue
        record = records[position]
        other = record.count > most or np.int64(record.flags) & _FORMS != form
        if record.op != op or record.count == 0 or other:
            source[k] = -1
            lost += 1
            continue
        scale[k] = record.scale
        if count is not None:
            count[k], exponent[k] = record.count, record.exponent
    return lost


@compiled
def gather_flags(
    records: NDArray[Any], source: NDArray[np.int64], op: int, owner: NDArray[np.uint8], out: NDArray[np.int64]
) -> None:
    """Writes the header flags of each owner's results in the ring (``source[k] >= 0``); -1: it has none there."""
    out[:] = -1
    for k in range(source.shape[0]):
        position = source[k]
        if position >= 0 and records[position].op == op:
            out[owner[k]] = max(out[owner[k]], 0) | np.int64(records[position].flags)


@compiled
def point_own(
    rows: NDArray[np.uint32],
    own: Results,
    source: NDArray[np.int64],
    scale: NDArray[np.float32],
) -> None:
    """Points the own rows of ``source`` at the own results: -2 - place, or -1 where no rank contributed."""
    for place in range(rows.shape[0]):
        k = rows[place]
        source[k] = -2 - place if own.usable[place] else -1
        scale[k] = own.scale[place]
