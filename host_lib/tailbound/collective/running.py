"""Which running ops have news: one compiled pass a turn over what the kernel has written of them.

Ops wait most of the time, and a turn is taken for one of many. Every op has a row here: what had been seen of it at the
last look, what would be news, and when the time alone is. An op without news is passed over: ``step`` would say again
what it said last, which the simulation asserts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.collective.known import Known
from tailbound.collective.op import Op, Phase, Sending
from tailbound.collective.view import View
from tailbound.transport.recovery import NEVER
from tailbound.wire.jit import compiled

_NEVER = 0xFFFFFFFF
#: What is to be waited for of one op; all in one record, since Python writes that as quickly as one field.
_WAIT = np.dtype(
    [
        ("running", np.uint8),
        ("label", np.uint32),
        ("slot", np.uint32),  # of its record
        ("look", np.int64),  # when the time alone is news, ns; 0: never
        ("starts", np.uint8),  # its clock has not started
        ("watched", np.uint8),  # every row that is taken is news
        ("complete_at", np.uint32),  # complete own rows that may end the first half
        ("results_at", np.uint32),  # results that may end the second half
    ],
    align=True,
)
#: The same for ``struct``, which writes a record in a fifth of the time that an array takes for a tuple.
_RECORD = struct.Struct("@BIIqBBII4x")
assert _RECORD.size == _WAIT.itemsize
#: What had been seen of it when it had news last.
_SEEN = np.dtype(
    [
        ("known", np.uint8),  # there is a record
        ("layout", np.uint32),
        ("fewer", np.uint64),  # ``majority_ns``
        ("need", np.uint64),
        ("contributed", np.uint32),  # ranks whose marks cover the op
        ("published", np.uint32),
        ("progress", np.uint32),
        ("results_in", np.uint32),
    ],
    align=True,
)


_NOTHING_SEEN = np.zeros(1, _SEEN)


class Running:
    """Rows of the ops in flight of one rank."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._states, self._records = known.records.peer_states[: known.world], known.records.ops
        self._terms: object = None
        self._waits, self._seen = np.zeros(0, _WAIT), np.zeros(0, _SEEN)
        self._free: list[int] = []
        self._grow()
        self.find(0)  # compiled before the first op

    def _grow(self) -> None:
        before = len(self._waits)
        size = max(16, 2 * before)
        self._free += range(before, size)
        self._waits = np.concatenate([self._waits, np.zeros(size - before, _WAIT)])
        self._seen = np.concatenate([self._seen, np.zeros(size - before, _SEEN)])
        self._running = self._waits["running"]  # a column: a field of a row takes three times as long to write
        self._bytes = self._waits.view(np.uint8).data
        self._found = bytearray(size)
        self._flags: NDArray[np.uint8] = np.frombuffer(self._found, np.uint8)

    def add(self, op: Op) -> None:
        """``op`` is in flight from now on."""
        if not self._free:
            self._grow()
        op.row, label = self._free.pop(), op.label
        _RECORD.pack_into(self._bytes, op.row * _RECORD.size, 1, label, op.slot, 0, 0, 0, _NEVER, _NEVER)
        self._seen[op.row : op.row + 1] = _NOTHING_SEEN

    def remove(self, op: Op) -> None:
        """``op`` is in flight no more."""
        self._running[op.row] = 0
        self._free.append(op.row)

    # -- looking ------------------------------------------------------------------------------------------------------

    def changed(self) -> bool:
        """Whether something that concerns all ops is another since it was last asked: all have news then."""
        known = self._known
        deadlines = known.deadlines
        terms = known.membership.changes, known.self_late, deadlines.quiet, deadlines.start_max
        before, self._terms = self._terms, terms
        return terms != before

    def find(self, now: int) -> int:
        """Looks which ops have news for ``has_news``; returns when the others are to be looked at, ns (0: never)."""
        return int(_find(self._waits, self._seen, self._records, self._states, self._known.cookie, now, self._flags))

    def has_news(self, op: Op) -> bool:
        """Whether ``op`` had news when ``find`` was called, or something but the kernel has changed it."""
        return op.stirred or self._found[op.row] != 0

    def looked(self, op: Op, view: View, look: int) -> None:
        """All that there is to do for ``op`` has been done; ``look``: see ``step.Step``."""
        known, row, launched, encoded = self._known, op.row, op.launch is not None, op.sending is Sending.OVER
        finished = op.second.phase is not Phase.OPEN
        complete_at = results_at = _NEVER
        watched = op.first.quiet.since != 0
        if op.first.phase is Phase.OPEN:
            if encoded or known.self_late:
                complete_at = view.own
        elif launched and encoded and not finished:
            watched = op.second.quiet.since != 0 or op.switched
            results_at = op.place.layout.shape.rows - (0 if op.switched else view.own)
            owners = known.membership.owners
            if not op.switched and len(owners) < len(known.peers):
                results_at = min(results_at, sum(op.place.placement.shares[p] for p in owners))
        if launched and not encoded:
            look = 1  # at every opportunity: another op may be what it waits for
        op.stirred, op.news, op.listen = False, True, NEVER if finished else 0
        _RECORD.pack_into(
            self._bytes, row * _RECORD.size, 1, op.label, op.slot, look, not op.start, watched, complete_at, results_at
        )

    # -- listening ----------------------------------------------------------------------------------------------------

    def silent(self, ops: Iterable[Op], now: int) -> tuple[list[Op], int]:
        """Those of ``ops`` whose flows are to be looked at, and when to look at those of the others, ns (0: never)."""
        found, look = [], NEVER
        for op in ops:
            if op.stirred or now >= op.listen:
                found.append(op)
            else:
                look = min(look, op.listen)
        return found, look if look < NEVER else 0


@compiled
def _find(
    waits: NDArray[Any],
    seen: NDArray[Any],
    records: NDArray[Any],
    states: NDArray[Any],
    cookie: int,
    now: int,
    found: NDArray[np.uint8],
) -> int:
    """Sets ``found`` for rows with news, and notes what there is of these.

    Returns:
        The earliest ``look`` of the others, or 0.
    """
    least = np.int64(0)
    for i in range(waits.shape[0]):
        found[i] = 0
        row, was = waits[i], seen[i]
        if not row.running:
            continue
        contributed, published = np.uint32(0), np.uint32(0)
        for rank in range(states.shape[0]):
            state = states[rank]
            if state.cookie == cookie:
                contributed += np.uint32(np.int32(np.uint32(state.contributed) - np.uint32(row.label)) >= 0)
                published += np.uint32(np.int32(np.uint32(state.published) - np.uint32(row.label)) >= 0)
        record = records[row.slot]
        known = np.uint8(record.op == row.label and record.cookie == cookie)
        news = (row.look != 0 and now >= row.look) or known != was.known
        news = news or contributed != was.contributed or published != was.published
        if known:
            fewer, need = record.majority_ns[0], record.majority_ns[1]
            news = news or record.layout != was.layout
            news = news or (row.starts != 0 and (fewer != was.fewer or need != was.need))
            news = news or record.rows_complete >= row.complete_at or record.results_in >= row.results_at
            if row.watched:
                news = news or record.progress != was.progress or record.results_in != was.results_in
            if news:
                was.layout, was.fewer, was.need = record.layout, fewer, need
                was.progress, was.results_in = record.progress, record.results_in
        elif row.results_at != _NEVER:  # what is there has to be counted
            news = True
        if news:
            found[i] = 1
            was.known, was.contributed, was.published = known, contributed, published
        elif row.look != 0 and (least == 0 or row.look < least):
            least = row.look
    return int(least)
