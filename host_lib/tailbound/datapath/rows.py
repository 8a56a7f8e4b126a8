"""What becomes of a row once its packet may be trusted: sums and results. kernel-16 and kernel-17."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.datapath.ops import covers, emit, has, op_position, over, put, serial
from tailbound.datapath.tables import (
    control_at,
    expect_results_at,
    op_at,
    presence_at,
    result_at,
    slot_at,
    slot_lock_at,
    u64_row,
)
from tailbound.wire.expect import expected_of
from tailbound.wire.jit import Scalar, compiled
from tailbound.wire.schema import EXPONENT_NONE, MAX_RANKS, VERDICTS, Event, Flag, Verdict

_REPEAT, _HALVES = int(Flag.REPEAT), int(Flag.HALVES)
_BYTES = np.uint64(0x00FF00FF00FF00FF)
_NIBBLE_LANES = np.uint64(0x000F000F000F000F)
_EIGHT, _FOUR, _TWELVE = np.uint64(8), np.uint64(4), np.uint64(12)


@compiled
def _sum_halves(row: NDArray[np.uint64], words: NDArray[np.uint64], add: Scalar) -> None:
    """Half bytes to lanes of 16 bits: per word even and odd codes of the lower halves, then of the upper ones."""
    for i in range(words.shape[0]):
        w = words[i]
        even, odd = w & _NIBBLE_LANES, (w >> _EIGHT) & _NIBBLE_LANES
        upper_even, upper_odd = (w >> _FOUR) & _NIBBLE_LANES, (w >> _TWELVE) & _NIBBLE_LANES
        if add:
            row[4 * i] += even
            row[4 * i + 1] += odd
            row[4 * i + 2] += upper_even
            row[4 * i + 3] += upper_odd
        else:
            row[4 * i] = even
            row[4 * i + 1] = odd
            row[4 * i + 2] = upper_even
            row[4 * i + 3] = upper_odd


@compiled
def _sum(t: Any, slot: Scalar, h: Any, words: NDArray[np.uint64], add: Scalar) -> None:
    """Adds codes to the slot's lanes of 16 bits, or stores them, where a sum begins."""
    row = u64_row(t.sums, slot, t.width // 4)
    if h.flags & _HALVES:
        _sum_halves(row, words, add)
        return
    k = np.uint64(h.shift)
    if add:
        for i in range(words.shape[0]):
            w = words[i]
            row[2 * i] += (w & _BYTES) << k
            row[2 * i + 1] += ((w >> _EIGHT) & _BYTES) << k
    else:
        for i in range(words.shape[0]):
            w = words[i]
            row[2 * i] = (w & _BYTES) << k
            row[2 * i + 1] = ((w >> _EIGHT) & _BYTES) << k


@compiled
def _abandon(t: Any, ranks: NDArray[np.uint64]) -> None:
    """Charges every rank in a sum that is stored over: what it had been counted for is not in any more."""
    for rank in range(MAX_RANKS):
        if has(ranks, rank):
            u64_row(t.ledger, rank, VERDICTS)[Verdict.ABANDONED] += np.uint64(1)


@compiled
def contribute(t: Any, h: Any, words: NDArray[np.uint64], now: Scalar) -> Scalar:
    """kernel-16: adds a contribution to its slot, or stores it as the first. ``words`` is the payload."""
    sender = np.int64(h.sender)
    slot = np.int64(h.seq) & (t.sum_rows - 1)
    record = slot_at(t.slots, slot)
    r = op_at(t.ops, op_position(np.int64(h.op)))
    if serial(h.op, slot_lock_at(t.slot_locks, slot).sealed_op) <= 0:
        r.late += np.uint32(1)
        return Verdict.LATE
    wanted_exponent = expected_of(u64_row(t.expect, slot, 1)[0], h.op)
    expected = wanted_exponent != EXPONENT_NONE
    same = record.cookie == h.cookie and record.op == h.op
    if not same and record.cookie == h.cookie and serial(record.op, h.op) > 0:
        return Verdict.STALE_OP
    exponent = np.int64(h.exponent)
    right = expected and exponent == wanted_exponent
    wrong_sum = same and right and exponent != np.int64(record.exponent)
    if same and not wrong_sum and has(record.ranks, sender):
        return Verdict.DUPLICATE_REPAIR if h.flags & _REPEAT else Verdict.DUPLICATE
    if expected and not right:
        return Verdict.SCALE_MISMATCH
    if not same and not over(control_at(t.control, 0), record):
        return Verdict.FUTURE_OP
    if wrong_sum:
        _abandon(t, record.ranks)
        r.rows_complete -= np.int32(record.counted)
        same = False
    if same:
        if not expected and exponent != np.int64(record.exponent):
            return Verdict.SCALE_MISMATCH
        record.count += np.uint32(1)
        record.units += np.uint32(1) << np.uint32(h.shift)
        record.need = max(np.int64(record.need), np.int64(h.need))
    else:
        for i in range(4):
            record.ranks[i] = 0
        record.count = 1
        record.units = np.uint32(1) << np.uint32(h.shift)
        record.need = h.need
        record.exponent = h.exponent
        record.row = h.row
        record.counted = 0
        record.cookie = h.cookie
        record.op = h.op
    _sum(t, slot, h, words, same)
    put(record.ranks, sender)
    if r.rows == 0:
        r.rows = h.rows
    r.progress += np.uint32(1)
    if not record.counted and covers(record.ranks, control_at(t.control, 0).live):  # once, however the live set changes
        record.counted = 1
        r.rows_complete += np.int32(1)
        if r.rows_complete == np.int64(r.rows):
            emit(t, Event.COMPLETE, h.op, now)
    return Verdict.ADDED if same else Verdict.STORED


@compiled
def publish(t: Any, h: Any, words: NDArray[np.uint64], now: Scalar) -> Scalar:
    """kernel-17: copies a result into its row and marks it present. ``words`` is the payload."""
    position = np.int64(h.seq) & (t.result_rows - 1)
    record = result_at(t.result_records, position)
    if record.cookie == h.cookie:
        if record.op == h.op:
            return Verdict.DUPLICATE_REPAIR_RESULT if h.flags & _REPEAT else Verdict.DUPLICATE_RESULT
        if serial(record.op, h.op) > 0:
            return Verdict.STALE_RESULT
        if not over(control_at(t.control, 0), record):
            return Verdict.FUTURE_RESULT
    row = u64_row(t.results, position, t.width // 8)
    for i in range(words.shape[0]):
        row[i] = words[i]
    record.scale = h.scale
    record.count = h.count
    record.exponent = h.exponent
    record.owner = h.owner
    record.row = h.row
    record.flags = h.flags
    record.cookie = h.cookie
    record.op = h.op
    present = presence_at(t.presence, position)
    present.op = h.op
    present.cookie = h.cookie
    at = op_position(np.int64(h.op))
    r = op_at(t.ops, at)
    if r.cookie != h.cookie or r.op != h.op:
        return Verdict.RESULT_TAKEN
    r.results_in += np.uint32(1)
    wanted = expect_results_at(t.expect_results, at)
    if wanted.op == h.op and wanted.rows > 0 and r.results_in >= wanted.rows:
        emit(t, Event.RESULTS_COMPLETE, h.op, now)
    return Verdict.RESULT_TAKEN
