"""Ops of rank 0 over plain memory, and what the library finds of them (``host_lib/core/halves.c``)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tailbound.codec.shape import shape_for
from tailbound.collective.buffers import Buffers
from tailbound.collective.op import Flow, Half, Launch, Op
from tailbound.collective.speaker import Marks, Speaker, Voice
from tailbound.collective.terms import Overtime
from tailbound.datapath.protocol import allocate, store_of
from tailbound.kernel.core import core
from tailbound.transport.config import MS, Config
from tailbound.transport.control import Header
from tailbound.transport.sequence import Layout, Sequence
from tailbound.wire.schema import VERSION, Found, Sending, op_slot

COOKIE = 7


def places(half: Half, flow: Flow) -> list[int]:
    """Rows of a flow that are to be requested now: places in its sender's list, rising."""
    found = (ctypes.c_int64 * flow.requests)()
    return found[: core().fast.tb_requests(ctypes.addressof(half), flow.rank, found)]


def asked(overtime: Overtime, rank: int, now: int, heard: int) -> None:
    """``rank``, last heard of at ``heard``, has been asked for a word."""
    core().fast.tb_question(ctypes.addressof(overtime.open), rank, now, heard)


def spoke(overtime: Overtime, rank: int, now: int) -> None:
    """``rank`` said something."""
    core().fast.tb_spoke(ctypes.addressof(overtime), ctypes.addressof(overtime.open), rank, now)


class OpWorld:
    """Rank 0 of ``ranks``; marks of others, the records of ops and the rows that are in are what a test says.

    Args:
        ranks: how many.
        rows: of either ring.
        config: of the rank.
    """

    def __init__(self, ranks: int, rows: int = 64, **config: Any) -> None:
        self.known = Speaker(Config(0, ranks, **config), store_of(allocate(64, rows, rows)), None, COOKIE, lambda: 0)
        self.terms, self.store, self.fast = self.known.terms, self.known.store, core().fast
        self.store.control["need"] = self.known.membership.majority
        self.store.peer_states["cookie"][:ranks] = COOKIE
        self.known.follow()

    def speaks(self, line: int, width: int, largest: int = 1) -> Voice:
        """By a send queue, with marks 5 and 6."""
        self._said = Header(version=VERSION, cookie=COOKIE), Marks(5, 6)
        voice = Voice(self.terms.pointer, line, *map(ctypes.addressof, self._said))
        voice.width, voice.largest, voice.requests = width, largest, self.known.repairs.asked
        return voice

    def marks(self, name: str, label: int, ranks: Any) -> None:
        """``name`` of these ranks, and no others, covers the op."""
        for rank in self.known.peers:
            self.store.peer_states[rank][name] = label if rank in ranks else label - 1 & 0xFFFFFFFF

    def record(self, label: int, fields: dict[str, Any] | None) -> Any:
        """The kernel's record of an op; None: no packet has named it."""
        found = self.store.ops[op_slot(label)]
        found["op"], found["cookie"] = label, COOKIE if fields is not None else 0
        for name, value in (fields or {}).items():
            found[name] = value
        return found

    def move(self, op: Any, now: int, asked: int = 0) -> Found:
        """The next thing to be done for one op; ``asked``: see ``tb_own_op``."""
        self.known.follow()
        op.asked, op.due = asked, 0
        return self.again(op, now)

    def again(self, op: Any, now: int) -> Found:
        """The same after an answer."""
        return Found(self.fast.tb_move(self.terms.pointer, ctypes.addressof(op), now))

    def listen(self, op: Any, now: int) -> bool:
        """Looks at its flows; whether something is to be asked for."""
        return bool(self.fast.tb_listen_to(self.terms.pointer, ctypes.addressof(op), now))

    def start_clock(self, op: Any, now: int) -> int:
        """When its clock starts at the latest; 0: it has, or only others can start it."""
        self.known.follow()
        return int(self.fast.tb_start_clock(self.terms.pointer, ctypes.addressof(op), now))


def launched(sequence: Sequence, ranks: int, index: int = 0, entries: int = 64 * 60) -> Op:
    """The op of that index in a step of ``sequence``, which rank 0 has launched at 1 ms."""
    shape, data = shape_for(entries, 64), np.zeros(entries, np.float32)
    placed, _ = sequence.assign(Layout((index, entries, 0, 1), shape, 7, False))
    made = Op(placed, Buffers(shape, placed.placement, 0, ranks), 0, ranks)
    made.launch = Launch(placed.layout, data, data, lambda outcome: None, MS)
    made.admitted, made.sending = MS, Sending.LAUNCHED
    return made


def begin(half: Any, start: int, length: int, most: int, floor: int = 1) -> Any:
    """Starts the deadline of a half."""
    core().fast.tb_start_half(ctypes.addressof(half), start, length, most, floor)
    return half
