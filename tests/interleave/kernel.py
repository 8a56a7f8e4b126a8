"""The kernel program over the same states: tables put into one of them, an action done, and the state afterwards."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import cases
from interleave.scene import RECORD, Action
from interleave.tables import HINTS, PARTS, Layout
from kernel_world import KernelWorld
from tailbound_lab.bench.program_run import run_xdp


class KernelTables:
    """The tables of a world of the kernel's; ``layout`` is that of ``Explored``."""

    def __init__(self, world: KernelWorld, layout: Layout) -> None:
        self.world = world
        self.store = world.store
        arrays = world.maps.arrays
        self.layout = layout
        self._sealed = 0
        self._parts: list[tuple[str, int, Any]] = []  # array, first byte of a state, bytes of the tables
        at = 0
        for name, first, entries, size in PARTS:
            if name == "slot_locks":
                self._lock_at, at = at, at + 8
                continue
            rows = arrays[name][first : first + entries]
            memory = rows.view(np.uint8).reshape(-1)[: size or rows.nbytes]
            self._parts.append((name, at, memory))
            at += memory.size
        self._record = arrays["ops"][RECORD : RECORD + 1]
        self._ledger = arrays["ledger"]["verdict"].reshape(-1, 257, 64)

    def control(self, **values: Any) -> None:
        self.world.control(**values)

    def seal(self, op: int, seq: int, rows: int) -> None:
        self.world.sealer.seal(op, seq, rows)
        self._sealed = op

    def expect_results(self, op: int, rows: int) -> None:
        self.store.expect_results[RECORD] = (op, rows)

    def put(self, state: bytes) -> None:
        """The tables as in a state."""
        for _, at, memory in self._parts:
            memory[:] = np.frombuffer(state, np.uint8, memory.size, at)
        _, sealed = np.frombuffer(state, np.uint32, 2, self._lock_at).tolist()
        self.seal(sealed, cases.SUM_BASE, 1)
        self._ledger[:] = 0
        self.world.ring.drain()

    def take(self) -> bytes:
        """The state of the tables."""
        for hint in HINTS:
            self._record[hint] = 0
        out = bytearray(self.layout.size)
        for _, at, memory in self._parts:
            out[at : at + memory.size] = memory.tobytes()
        out[self._lock_at + 4 : self._lock_at + 8] = self._sealed.to_bytes(4, sys.byteorder)
        return bytes(out)

    def gained(self) -> tuple[tuple[int, int], ...]:
        """What the ledger holds as (sender, verdict), once per count."""
        counts = self._ledger.sum(0)
        return tuple((int(r), int(v)) for r, v in np.argwhere(counts) for _ in range(int(counts[r, v])))

    def do(self, action: Action, linear: int | None = None) -> tuple[tuple[tuple[int, int], ...], Any]:
        """Does an action, a packet perhaps in pieces; what the ledger gained, and events as (kind, op)."""
        if not action.packet:
            action.move(self)
            return (), ()
        frame = self.world.frame_of(action.packet, action.sender)
        run_xdp(self.world.program, frame, 1, linear)
        return self.gained(), tuple(event[:2] for event in self.world.ring.drain())
