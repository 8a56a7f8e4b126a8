"""Who was heard in an op and when: serial numbers, windows, op records, tails, events. kernel-14 and kernel-15.

The order of the tests and the verdicts are those of ``ebpf/``; the same table of cases (``tests/tables/cases.py``) runs
through both. The kernel takes a lock per slot, row, op and peer; here one mutex is held for a whole received buffer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.datapath.native import lock, unlock
from tailbound.datapath.tables import (
    EVENT_HEAD,
    EVENT_QUEUE,
    EVENT_TAIL,
    EVENTS_LOST,
    STATE_WORDS,
    arrival_at,
    control_at,
    i64_row,
    op_at,
    u64_row,
)
from tailbound.wire.jit import Scalar, compiled
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import MAX_RANKS, OP_INDEX_BITS, OP_PER_STEP, OP_STEPS, Event, Flag, PacketType, Verdict

_ABSTAIN, _LATE = int(Flag.ABSTAIN), int(Flag.LATE)  # numba knows IntEnum, but not IntFlag
_ONE = np.uint64(1)
_RECORD_WORDS = DTYPES["tb_op"].itemsize // 8
#: Not a verdict: the packet is good so far.
GO_ON = -1


@compiled
def serial(a: Scalar, b: Scalar) -> Scalar:
    """Signed distance a - b of two u32 serial numbers."""
    return np.int64(np.int32(np.int64(a) - np.int64(b)))


@compiled
def has(bitmap: NDArray[np.uint64], rank: Scalar) -> Scalar:
    """Whether ``rank`` is in the bitmap (u64[4])."""
    return (bitmap[rank >> 6] >> np.uint64(rank & 63)) & _ONE == _ONE


@compiled
def put(bitmap: NDArray[np.uint64], rank: Scalar) -> None:
    """Adds ``rank`` to the bitmap (u64[4])."""
    bitmap[rank >> 6] |= _ONE << np.uint64(rank & 63)


@compiled
def covers(bitmap: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> Scalar:
    """Whether every rank of ``wanted`` is in the bitmap."""
    missing = np.uint64(0)
    for i in range(4):
        missing |= wanted[i] & ~bitmap[i]
    return missing == np.uint64(0)


@compiled
def emit(t: Any, kind: Scalar, op: Scalar, now: Scalar) -> None:
    """Queues an event; one that does not fit is counted and forgotten, since events are hints."""
    s = i64_row(t.state, 0, STATE_WORDS)
    lock(t.queue_mutex)
    end = s[EVENT_HEAD]
    if end - s[EVENT_TAIL] >= EVENT_QUEUE:
        s[EVENTS_LOST] += 1
    else:
        entry = u64_row(t.events, end & (EVENT_QUEUE - 1), 3)
        entry[0] = np.uint64(kind)
        entry[1] = np.uint64(op)
        entry[2] = np.uint64(now)
        s[EVENT_HEAD] = end + 1
    unlock(t.queue_mutex)


@compiled
def ahead(c: Any, op: Scalar) -> Scalar:
    """Whether op records do not reach as far as this label: see ``ebpf/op.h``."""
    return serial(op, c.released) > OP_STEPS << OP_INDEX_BITS


@compiled
def over(c: Any, record: Any) -> Scalar:
    """Whether what a row holds is of an op that is over here, or of another job: nobody reads it, so it may go."""
    return record.cookie != c.cookie or serial(record.op, c.released) <= 0


@compiled
def is_newer(c: Any, r: Any, h: Any) -> Scalar:
    """Whether an op record is a newer op's than the packet's. One further ahead than records reach is an old one, which
    nobody has used for half the circle of labels.
    """
    return r.cookie == h.cookie and serial(r.op, h.op) > 0 and not ahead(c, r.op)


@compiled
def gone(h: Any) -> Scalar:
    """Why a packet comes too late: its op's record, or its place in the ring, is a newer op's."""
    return Verdict.STALE_OP if h.type == PacketType.CONTRIBUTION else Verdict.STALE_RESULT


@compiled
def window(t: Any, h: Any) -> Scalar:
    """kernel-14: ``GO_ON`` if the row lies in its ring's window, and the op is not before the first nor too far ahead.

    Results need no record of their op, only their place: any op may have them.
    """
    c = control_at(t.control, 0)
    contribution = h.type == PacketType.CONTRIBUTION
    if serial(h.op, c.first_op) < 0:
        return gone(h)
    d = serial(h.seq, c.sum_base if contribution else c.result_base)
    if d < 0:
        return gone(h)
    if d >= (t.sum_rows if contribution else t.result_rows) or (h.type != PacketType.RESULT and ahead(c, h.op)):
        return Verdict.FUTURE_OP if contribution else Verdict.FUTURE_RESULT
    return GO_ON


@compiled
def op_position(op: Scalar) -> Scalar:
    """Position of an op's record, as ``schema.op_slot``."""
    return ((op >> OP_INDEX_BITS) % OP_STEPS) * OP_PER_STEP + (op & ((1 << OP_INDEX_BITS) - 1)) % OP_PER_STEP


@compiled
def _start(t: Any, h: Any, position: Scalar, codes: Scalar, now: Scalar) -> None:
    """Starts an op record anew. Its arrivals need no clearing: one counts only if its rank's heard bit is set."""
    words = u64_row(t.ops, position, _RECORD_WORDS)
    for i in range(_RECORD_WORDS):
        words[i] = 0
    r = op_at(t.ops, position)
    r.opened_ns = now
    r.layout = h.layout
    r.codes = codes
    r.first_sender = h.sender
    r.results_tag = h.cookie ^ h.op
    r.cookie = h.cookie
    r.op = h.op


@compiled
def hear(t: Any, h: Any, codes: Scalar, now: Scalar) -> Scalar:
    """kernel-15: finds or opens the op's record, notes who was heard and when, and the tails. ``GO_ON`` or a verdict.

    A result whose op can have no record leaves no trace in any.
    """
    sender = np.int64(h.sender)
    position = op_position(np.int64(h.op))
    r = op_at(t.ops, position)
    c = control_at(t.control, 0)
    if h.type == PacketType.RESULT and ahead(c, h.op):
        return GO_ON
    if r.cookie != h.cookie or r.op != h.op:
        if is_newer(c, r, h):
            return GO_ON if h.type == PacketType.RESULT else gone(h)
        _start(t, h, position, np.int64(0), now)
        emit(t, Event.OPENED, h.op, now)
    if r.layout != h.layout:
        return Verdict.LAYOUT_MISMATCH
    if h.type != PacketType.READY:
        if r.codes == 0:
            r.codes = codes
        elif r.codes != codes:
            return Verdict.LAYOUT_MISMATCH
    if h.flags & _ABSTAIN:
        put(r.abstained, sender)
    _note(t, h, position, has(c.live, sender), now)
    return GO_ON


@compiled
def _note(t: Any, h: Any, position: Scalar, live: Scalar, now: Scalar) -> None:
    """Notes of a sender, once each: its first packet in this op, that its contributions have begun, its tails.

    Contributions have begun, too, with a READY that says that they would come too late. A tail is the last percent of a
    sender's rows, or its mark that all were sent. Only a ``live`` sender counts for the majority and makes events.
    """
    sender = np.int64(h.sender)
    r = op_at(t.ops, position)
    c = control_at(t.control, 0)
    times = arrival_at(t.arrivals, position * MAX_RANKS + sender)
    since = np.uint32((now - np.int64(r.opened_ns)) // 1000 + 1)
    if not has(r.heard, sender):
        put(r.heard, sender)
        times.first_us = since
        times.contributed_us = 0
        times.published_us = 0
        times.row_us = 0
        if live:
            r.heard_live += np.uint32(1)
            reached = False
            for own in range(2):  # [0]: with the own launch counted, [1]: without
                if r.majority_ns[own] == 0 and np.int64(r.heard_live) + 1 - own >= np.int64(c.need):
                    r.majority_ns[own] = now
                    reached = True
            if reached:
                emit(t, Event.MAJORITY, h.op, now)
    contribution, result = h.type == PacketType.CONTRIBUTION, h.type == PacketType.RESULT
    if (contribution or (not result and h.flags & _LATE)) and not has(r.begun, sender):
        put(r.begun, sender)
        times.row_us = since
    rows = np.int64(h.rows)
    percent = rows // 100
    last = np.int64(h.row) >= rows - (percent if percent > 1 else 1)
    if contribution and (last or serial(h.contributed, h.op) >= 0) and not has(r.tail_contributed, sender):
        put(r.tail_contributed, sender)
        times.contributed_us = since
        if live and covers(r.tail_contributed, c.live):
            emit(t, Event.TAIL, h.op, now)
    if result and (last or serial(h.published, h.op) >= 0) and not has(r.tail_published, sender):
        put(r.tail_published, sender)
        times.published_us = since
        if live and covers(r.tail_published, c.live):
            emit(t, Event.RESULTS_TAIL, h.op, now)


@compiled
def stamp_late(t: Any, h: Any, codes: Scalar, now: Scalar) -> None:
    """A row behind the window leaves its arrival stamp, and only that, while its op's record lasts.

    Deadlines are learned from true arrival times, late rows included (clock-5), and so is the word that there
    would have been rows, but too late. A rank that has left all others behind is through with an op before anything of
    it came: then what is late opens the record.
    """
    position = op_position(np.int64(h.op))
    r = op_at(t.ops, position)
    if r.cookie != h.cookie or r.op != h.op:
        c = control_at(t.control, 0)
        if is_newer(c, r, h) or serial(h.op, c.released) > 0:
            return
        _start(t, h, position, codes, now)
    if r.layout != h.layout:
        return
    if h.type == PacketType.CONTRIBUTION:
        r.late += np.uint32(1)
    elif h.type == PacketType.RESULT:
        r.late_results += np.uint32(1)
    _note(t, h, position, np.bool_(0), now)
