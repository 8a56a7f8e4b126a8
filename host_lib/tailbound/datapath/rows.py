"""What becomes of a row once its packet may be trusted: sums and results. kernel-16 and kernel-17."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.datapath.ops import covers, emit, has, op_position, put, serial
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

_STORED, _ADDED, _RESULT_TAKEN = int(Verdict.STORED), int(Verdict.ADDED), int(Verdict.RESULT_TAKEN)
_STALE_OP, _STALE_RESULT, _LATE = int(Verdict.STALE_OP), int(Verdict.STALE_RESULT), int(Verdict.LATE)
_DUPLICATE, _DUPLICATE_RESULT = int(Verdict.DUPLICATE), int(Verdict.DUPLICATE_RESULT)
_DUPLICATE_REPAIR = int(Verdict.DUPLICATE_REPAIR)
_DUPLICATE_REPAIR_RESULT = int(Verdict.DUPLICATE_REPAIR_RESULT)
_REPEAT = int(Flag.REPEAT)
_SCALE_MISMATCH, _ABANDONED = int(Verdict.SCALE_MISMATCH), int(Verdict.ABANDONED)
_COMPLETE, _RESULTS_COMPLETE = np.int64(Event.COMPLETE), np.int64(Event.RESULTS_COMPLETE)
_NIBBLES = int(Flag.NIBBLES)
_HALVES, _FOUR = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4)
_LANES = np.uint64(0x00FF00FF00FF00FF)
_EIGHT = np.uint64(8)
_ONE = np.uint64(1)


@compiled
def _add(row: NDArray[np.uint64], words: NDArray[np.uint64], shift: Scalar) -> None:
    if shift == 0:
        for i in range(words.shape[0]):
            w = words[i]
            row[2 * i] += w & _LANES
            row[2 * i + 1] += (w >> _EIGHT) & _LANES
    else:
        k = np.uint64(shift)
        for i in range(words.shape[0]):
            w = words[i]
            row[2 * i] += (w & _LANES) << k
            row[2 * i + 1] += ((w >> _EIGHT) & _LANES) << k


@compiled
def _store(row: NDArray[np.uint64], words: NDArray[np.uint64], shift: Scalar) -> None:
    k = np.uint64(shift)
    for i in range(words.shape[0]):
        w = words[i]
        row[2 * i] = (w & _LANES) << k
        row[2 * i + 1] = ((w >> _EIGHT) & _LANES) << k


@compiled
def _add_nibbles(row: NDArray[np.uint64], words: NDArray[np.uint64]) -> None:
    for i in range(words.shape[0]):
        w = words[i]
        row[2 * i] += w & _HALVES
        row[2 * i + 1] += (w >> _FOUR) & _HALVES


@compiled
def _store_nibbles(row: NDArray[np.uint64], words: NDArray[np.uint64]) -> None:
    for i in range(words.shape[0]):
        w = words[i]
        row[2 * i] = w & _HALVES
        row[2 * i + 1] = (w >> _FOUR) & _HALVES


@compiled
def _abandon(t: Any, ranks: NDArray[np.uint64]) -> None:
    """Charges every rank in a sum that is stored over: what it had been counted for is not in any more."""
    for rank in range(MAX_RANKS):
        if has(ranks, rank):
            u64_row(t.ledger, rank, VERDICTS)[_ABANDONED] += _ONE


@compiled
def contribute(t: Any, h: Any, words: NDArray[np.uint64], now: Scalar) -> Scalar:
    """kernel-16: adds a contribution to its slot, or stores it as the first. ``words`` is the payload."""
    sender = np.int64(h.sender)
    slot = np.int64(h.seq) & (t.sum_rows - 1)
    record = slot_at(t.slots, slot)
    if serial(h.op, slot_lock_at(t.slot_locks, slot).sealed_op) <= 0:
        op_at(t.ops, op_position(np.int64(h.op))).late += np.uint32(1)
        return _LATE
    wanted_exponent = expected_of(u64_row(t.expect, slot, 1)[0], h.op)
    expected = wanted_exponent != EXPONENT_NONE
    same = record.cookie == h.cookie and record.op == h.op
    if not same and record.cookie == h.cookie and serial(record.op, h.op) > 0:
        return _STALE_OP
    exponent = np.int64(h.exponent)
    right = expected and exponent == wanted_exponent
    wrong_sum = same and right and exponent != np.int64(record.exponent)
    if same and not wrong_sum and has(record.ranks, sender):
        return _DUPLICATE_REPAIR if h.flags & _REPEAT else _DUPLICATE
    if expected and not right:
        return _SCALE_MISMATCH
    undone = np.uint32(0)
    if wrong_sum:
        undone = record.counted
        _abandon(t, record.ranks)
        same = False
    if same:
        if not expected and exponent != np.int64(record.exponent):
            return _SCALE_MISMATCH
        if h.flags & _NIBBLES:
            _add_nibbles(u64_row(t.sums, slot, t.width // 4), words)
        else:
            _add(u64_row(t.sums, slot, t.width // 4), words, np.int64(h.shift))
        record.count += np.uint32(1)
        record.units += np.uint32(1) << np.uint32(h.shift)
        record.need = max(np.int64(record.need), np.int64(h.need))
    else:
        if h.flags & _NIBBLES:
            _store_nibbles(u64_row(t.sums, slot, t.width // 4), words)
        else:
            _store(u64_row(t.sums, slot, t.width // 4), words, np.int64(h.shift))
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
    put(record.ranks, sender)
    r = op_at(t.ops, op_position(np.int64(h.op)))
    if r.rows == 0:
        r.rows = h.rows
    r.progress += np.uint32(1)
    r.rows_complete -= np.int32(undone)
    if not record.counted and covers(record.ranks, control_at(t.control, 0).live):  # once, however the live set changes
        record.counted = 1
        r.rows_complete += np.int32(1)
        if r.rows_complete == np.int64(r.rows):
            emit(t, _COMPLETE, h.op, now)
    return _ADDED if same else _STORED


@compiled
def publish(t: Any, h: Any, words: NDArray[np.uint64], now: Scalar) -> Scalar:
    """kernel-17: copies a result into its row and marks it present. ``words`` is the payload."""
    position = np.int64(h.seq) & (t.result_rows - 1)
    record = result_at(t.result_records, position)
    if record.cookie == h.cookie:
        if record.op == h.op:
            return _DUPLICATE_REPAIR_RESULT if h.flags & _REPEAT else _DUPLICATE_RESULT
        if serial(record.op, h.op) > 0:
            return _STALE_RESULT
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
        return _RESULT_TAKEN
    r.results_in += np.uint32(1)
    wanted = expect_results_at(t.expect_results, at)
    if wanted.op == h.op and wanted.rows > 0 and r.results_in >= wanted.rows:
        emit(t, _RESULTS_COMPLETE, h.op, now)
    return _RESULT_TAKEN
