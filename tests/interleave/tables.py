"""The udp datapath's tables, with the part of them that an action may change taken out and put back as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cases
from interleave.scene import CODES, RECORD, RESULT_ROW, SENDERS, SLOT, SUM_BYTES, Action
from tailbound.datapath.store import allocate
from tailbound.datapath.tables import EVENT_HEAD, EVENT_TAIL, Tables
from tailbound.wire.schema import MAX_RANKS, Verdict
from udp_world import World

#: The time of every packet: states differ by what happened, not by when.
NOW = 1_000_000_000
#: Hints that no rule reads and that only ever rise: left out of states, so that there are finitely many.
HINTS = ("progress", "late", "late_results")

#: Array, first entry, entries, and bytes of each (0: whole): what the actions of a scene may change.
PARTS: tuple[tuple[str, int, int, int], ...] = (
    ("control", 0, 1, 0),
    ("slot_locks", SLOT, 1, 0),
    ("slots", SLOT, 1, 0),
    ("sums", SLOT, 1, SUM_BYTES),
    ("result_records", RESULT_ROW, 1, 0),
    ("presence", RESULT_ROW, 1, 0),
    ("results", RESULT_ROW, 1, CODES),
    ("expect_results", RECORD, 1, 0),
    ("ops", RECORD, 1, 0),
    ("arrivals", RECORD * MAX_RANKS + SENDERS[0], len(SENDERS), 0),
    ("peer_states", SENDERS[0], len(SENDERS), 0),
)


class Layout:
    """Where fields stand in a state."""

    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None:
        self.size = 0
        self.at: dict[str, int] = {}  # "slots.op", "arrivals.1.first_us": byte
        self._times: list[tuple[int, int]] = []  # bytes that hold a time
        self._field: dict[str, tuple[int, int, bool]] = {}
        self.words: list[str] = []  # what every word of eight bytes holds
        for name, _, entries, size in PARTS:
            dtype = arrays[name].dtype
            for entry in range(entries):
                stem = name if entries == 1 else f"{name}.{entry + 1}"
                self.at[stem] = self.size
                if dtype.names is None:
                    self.words += [stem] * (size // 8)
                    self.size += size
                    continue
                labels: list[list[str]] = [[] for _ in range(dtype.itemsize // 8)]
                for field, (kind, offset, *_) in dtype.fields.items():
                    base = kind.base
                    self._field[f"{stem}.{field}"] = (self.size + offset, min(base.itemsize, 8), base.kind == "i")
                    if field.endswith(("_ns", "_us")):
                        size = base.itemsize
                        self._times += [(self.size + at, size) for at in range(offset, offset + kind.itemsize, size)]
                    for word in range(offset // 8, (offset + kind.itemsize + 7) // 8):
                        labels[word].append(field)
                self.words += [f"{stem}.{'/'.join(fields)}" for fields in labels]
                self.size += dtype.itemsize

    def get(self, state: bytes, name: str) -> int:
        """A field of a state, of arrays the first item."""
        at, size, signed = self._field[name]
        return int.from_bytes(state[at : at + size], "little", signed=signed)

    def fields(self) -> tuple[str, ...]:
        """Names of all fields that ``get`` knows."""
        return tuple(self._field)

    def array(self, word: str) -> str:
        """The array, and of arrays of several the entry, that a name in ``words`` stands for."""
        return next(stem for stem in self.at if word == stem or word.startswith(f"{stem}."))

    def changed(self, before: bytes, after: bytes) -> frozenset[str]:
        """Names in ``words`` of all that differs."""
        if before == after:
            return frozenset()
        words = np.frombuffer(before, np.uint64) != np.frombuffer(after, np.uint64)
        return frozenset([self.words[i] for i in np.flatnonzero(words).tolist()])

    def timeless(self, state: bytes) -> bytes:
        """The same with 1 in place of every time."""
        out = bytearray(state)
        for at, size in self._times:
            if any(out[at : at + size]):
                out[at : at + size] = (1).to_bytes(size, "little")
        return bytes(out)

    def part(self, state: bytes, name: str, size: int) -> bytes:
        """Bytes of a part."""
        at = self.at[name]
        return state[at : at + size]


class Explored:
    """A world of which states can be taken and put back.

    All its arrays lie in one piece of memory, so that the words of a state are one gather and one scatter.
    """

    def __init__(self, make: Callable[[Any], Any] = Tables) -> None:
        self._memory = np.zeros(1 << 20, np.uint64)
        self._used = 0
        allocated = allocate(cases.WIDTH, cases.SUM_ROWS, cases.RESULT_ROWS, make=self._make)
        self.world = World(allocated=allocated, make=make)
        self.world.clock = NOW
        self.store = self.world.store
        arrays = self.world.tables.arrays
        self.layout = Layout(arrays)
        base = self._memory.ctypes.data
        where = []
        for name, first, entries, size in PARTS:
            array = arrays[name]
            for entry in range(first, first + entries):
                row = array[entry : entry + 1]
                start = (row.ctypes.data - base) // 8
                where.append(np.arange(start, start + (size or row.nbytes) // 8))
        self._where = np.concatenate(where)
        keep = np.zeros(self._memory.size, bool)
        keep[self._where] = True
        self._outside = np.flatnonzero(~keep)
        hints = arrays["ops"][RECORD : RECORD + 1]
        self._hints = [hints[name] for name in HINTS]
        self._ledger = arrays["ledger"]["verdict"].reshape(-1, 64)
        self._buffers: dict[str, NDArray[np.uint8]] = {}
        self._clean()
        self.before = self._memory.copy()

    def _make(self, _: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        size = dtype.itemsize * int(np.prod(shape))
        assert size % 8 == 0
        start = self._used
        self._used += size // 8
        return self._memory[start : self._used].view(dtype).reshape(shape)

    def _clean(self) -> None:
        for hint in self._hints:
            hint[0] = 0
        self._ledger[:] = 0

    # What a move of the host needs, of this world as of the kernel's.
    def control(self, **values: Any) -> None:
        self.world.control(**values)

    def seal(self, op: int, seq: int, rows: int) -> None:
        self.world.tables.seal(op, seq, rows)

    def expect_results(self, op: int, rows: int) -> None:
        self.store.expect_results[RECORD] = (op, rows)

    def take(self) -> bytes:
        """The state."""
        return self._memory[self._where].tobytes()

    def put(self, state: bytes) -> None:
        """Back to a state."""
        self._memory[self._where] = np.frombuffer(state, np.uint64)

    def do(self, action: Action) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Does an action; what the ledger gained as (sender, verdict), once per count, and events as (kind, op)."""
        if not action.packet:
            action.move(self)
            return (), ()
        buffer = self._buffers.get(action.name)
        if buffer is None:
            buffer = self._buffers[action.name] = np.frombuffer(bytearray(action.packet), np.uint8)
        self.world.take_in(buffer, len(action.packet), action.sender)
        flat = self._ledger[: cases.RANKS]
        gained = tuple(
            (int(at) >> 6, int(at) & 63) for at in np.flatnonzero(flat) for _ in range(int(flat[at >> 6, at & 63]))
        )
        flat[:] = 0
        for hint in self._hints:
            hint[0] = 0
        state = self.world.tables.state
        events: tuple[tuple[int, int], ...] = ()
        if state[EVENT_HEAD] != state[EVENT_TAIL]:
            events = tuple(event[:2] for event in self.world.tables.take_events())
        if action.kind == "ready":
            self.world.tables.take_controls()
        return gained, events

    def spilled(self) -> NDArray[np.int64]:
        """Words outside of states that have changed: there must be none, or states say too little."""
        changed = np.flatnonzero(self._memory != self.before)
        return changed[np.isin(changed, self._outside)]


def verdict_of(gained: tuple[tuple[int, int], ...]) -> Verdict | None:
    """The verdict among what a ledger gained."""
    return Verdict(gained[0][1]) if gained else None
