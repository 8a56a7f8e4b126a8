"""Pairs of actions by two CPUs in the kernel program: many pairs in one run, each with tables of its own.

The i-th pair has ops of its own (the same steps, another index), and with them a slot, a result row and a record. What
pairs share is the control record, so pairs of a run start from states with the same one.
"""

from __future__ import annotations

import mmap
import os
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cases
from interleave.scene import RECORD, A, Action, B, Op
from interleave.tables import HINTS, PARTS, Layout
from kernel_world import KernelWorld
from tailbound.kernel import load, syscalls
from tailbound.wire import packets
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import HEADER_BYTES, MAX_RANKS, OP_PER_STEP
from tailbound_lab.bench.program_run import run_xdp

SOURCE = Path(__file__).parents[1] / "kernel" / "pairs.bpf.c"
#: Pairs in one run. Ops of index 1 to ROWS - 1; the rings have a place for each.
ROWS = OP_PER_STEP
MOST = ROWS - 1
TURN = np.dtype(
    [("kind", "u4"), ("index", "u4"), ("value", "u8"), ("old", "u8"), ("frame", "u1", 112), ("pad", "u8", 13)]
)
MEETING = np.dtype(
    [
        *((name, "u4", 2) for name in ("here", "gone", "delay", "verdict")),
        ("seen", "u8", 2),
    ]
)
_PACKET, _SEAL, _EXPECT_RESULTS, _CONTROL = range(4)
_GO_ON = 0x101
#: Rounds of the program in one system call; a CPU that waits for the other one uses them up.
_REPEATS = 20_000
_LABELS = ("slots", "result_records", "presence", "ops", "expect_results")


def _shared_map(name: str, dtype: np.dtype[Any], entries: int) -> tuple[int, mmap.mmap, NDArray[Any]]:
    fd = syscalls.map_create(syscalls.MAP_TYPE_ARRAY, 4, dtype.itemsize, entries, name=name, flags=syscalls.F_MMAPABLE)
    size = -(-entries * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(fd, size, mmap.MAP_SHARED)
    return fd, memory, np.frombuffer(memory, dtype, entries)


@dataclass(frozen=True)
class Outcome:
    """What two actions have done.

    Attributes:
        state: bytes, in the words of one pair.
        verdicts: of each action; None for a move of the host.
        seen: op that presence named right after each of them, where that was looked at.
    """

    state: bytes
    verdicts: tuple[int | None, int | None]
    seen: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Pair:
    """Two actions in a state, and what they do one after the other: the first first, and the second first."""

    state: bytes
    actions: tuple[Action, Action]
    orders: tuple[Outcome, Outcome]


def of(op: Op, i: int) -> Op:
    """The op of pair ``i`` that stands for ``op``."""
    return Op(op.name, op.label - 1 + i, op.seq + i, op.result_seq + i)


class PairTables:
    """A program that does two actions at once, over the maps of a world whose rings have ``ROWS`` rows."""

    def __init__(self, world: KernelWorld, loader: str, layout: Layout) -> None:
        self.layout = layout
        self.world = world
        self.arrays = world.maps.arrays
        self._meeting_fd, self._m1, self.meetings = _shared_map("tb_meetings", MEETING, ROWS)
        self._turn_fd, self._m2, self.turns = _shared_map("tb_turns", TURN, 2 * ROWS)
        names = (*load.WORKER_MAP_NAMES, "meetings", "turns")
        fds = self.world.maps.fds | {"meetings": self._meeting_fd, "turns": self._turn_fd}
        defines = {"TB_WIDTH": cases.WIDTH, "TB_RESULT_ROWS": ROWS, "TB_PORT": cases.PORT}
        text = zlib.crc32(SOURCE.read_bytes()) & 0x7FFFFFFF  # what is kept compiled goes by the package's sources
        self.program = load.load(str(SOURCE), "tb_pairs", defines | {"TB_PAIRS": text}, names, fds, loader)
        self._frames: dict[tuple[str, int], NDArray[np.uint8]] = {}
        self._at: dict[str, int] = {}
        at = 0
        for name, _, entries, size in PARTS:
            self._at[name] = at
            at += entries * (size or self._item(name))

    def _item(self, name: str) -> int:
        return 8 if name == "slot_locks" else int(self.arrays[name].dtype.itemsize)

    def close(self) -> None:
        os.close(self.program)
        del self.meetings, self.turns
        for memory in (self._m1, self._m2):
            memory.close()
        os.close(self._meeting_fd)
        os.close(self._turn_fd)

    def _rows(self, name: str, n: int) -> Any:
        """Indices of the entries of ``n`` pairs in an array; [n, entries] for those of several."""
        i = np.arange(1, n + 1)
        if name in ("slot_locks", "slots", "sums"):
            return (cases.SUM_BASE + i) % ROWS
        if name in ("result_records", "presence", "results"):
            return (cases.RESULT_BASE + i) % ROWS
        record = RECORD - 1 + i
        return record[:, None] * MAX_RANKS + np.arange(1, 4) if name == "arrivals" else record

    @staticmethod
    def _relabel(labels: NDArray[Any], n: int, back: bool) -> None:
        """From the labels of A and B to those of the pairs' own ops, or back; in place."""
        for op in (A, B):
            own = op.label - 1 + np.arange(1, n + 1, dtype=np.uint32)
            here = labels == (own if back else op.label)
            labels[here] = op.label if back else own[here]

    @classmethod
    def _relabel_all(cls, records: NDArray[Any], n: int, back: bool) -> None:
        """The same for records with labels, and for what names a label under a cookie."""
        cls._relabel(records["op"], n, back)
        if "results_tag" in records.dtype.names:
            labels = records["results_tag"] ^ np.uint32(cases.COOKIE)
            cls._relabel(labels, n, back)
            records["results_tag"] = labels ^ np.uint32(cases.COOKIE)

    def _put(self, states: Sequence[bytes]) -> None:
        n = len(states)
        all_ = np.frombuffer(b"".join(states), np.uint8).reshape(n, -1)
        for name, _, entries, size in PARTS:
            if name in ("control", "peer_states"):
                continue
            width = size or self._item(name)
            part = np.ascontiguousarray(all_[:, self._at[name] : self._at[name] + entries * width])
            if name == "slot_locks":
                sealed = part.view(np.uint32).reshape(n, 2).copy()
                sealed[:, 0] = 0
                for op in (A, B):
                    sealed[sealed[:, 1] == op.label, 1] = op.label - 1 + MOST
                keys = self._rows(name, n).astype(np.uint32)
                fd = self.world.maps.fds["slot_locks"]
                syscalls.map_update_batch(fd, keys.ctypes.data, sealed.ctypes.data, n, syscalls.F_LOCK)
            elif size:
                self.arrays[name].view(np.uint8).reshape(len(self.arrays[name]), -1)[self._rows(name, n), :size] = part
            else:
                records = part.view(self.arrays[name].dtype).reshape(n, entries).copy()
                if name in _LABELS:
                    self._relabel_all(records[:, 0], n, False)
                self.arrays[name][self._rows(name, n)] = records if entries > 1 else records[:, 0]
        self._put_control(states[0])
        self.arrays["peer_states"][1:4] = 0

    def _put_control(self, state: bytes) -> None:
        """Windows as wide as the rings here, and an op over where all pairs' are."""
        at = self._at["control"]
        control = np.frombuffer(state, DTYPES["tb_control"], 1, at).copy()
        control["sum_rows"] = ROWS
        for name in ("released", "sum_base", "result_base", "map_since"):
            control[name] = self._wide(name, int(control[name][0]))
        self.arrays["control"][0] = control[0]

    @staticmethod
    def _wide(name: str, value: int) -> int:
        """What a word of control is for pairs of many ops."""
        if name == "released":
            return value - 1 + MOST if value == A.label else value
        if name == "sum_base":
            return cases.SUM_BASE + ROWS if value == B.seq else value
        if name == "result_base":
            return cases.RESULT_BASE + ROWS if value == B.result_seq else value
        return B.label - 1 if value == B.label else value

    def _frame(self, action: Action, i: int) -> NDArray[np.uint8]:
        key = (action.name, i)
        if key not in self._frames:
            parsed = packets.parse(action.packet)
            assert parsed is not None
            head, body = parsed[0].copy(), parsed[1]
            own = of(action.op, i)
            apart = ROWS - (cases.RESULT_ROWS if action.kind != "contribution" else cases.SUM_ROWS)
            for name in ("op", "contributed", "published"):
                if head[name][0] == action.op.label:
                    head[name] = own.label
            head["seq"] = head["seq"] + i + (apart if action.op is B else 0)
            frame = self.world.frame_of(packets.packet(head, body), action.sender)
            assert len(frame) == 122
            assert len(body) == 122 - 42 - HEADER_BYTES
            self._frames[key] = np.frombuffer(frame[12:] + b"\0\0", np.uint8)
        return self._frames[key]

    def _turn(self, at: int, action: Action, i: int, state: bytes) -> None:
        turn = self.turns[at]
        if action.packet:
            turn["kind"], turn["index"] = _PACKET, int(self._rows("presence", i)[-1])
            turn["frame"] = self._frame(action, i)
            return
        own = of(action.op, i)
        if action.name.startswith("seal"):
            values = (_SEAL, int(self._rows("slots", i)[-1]), own.label - i + MOST, 0)
        elif action.name.startswith("results of"):
            values = (_EXPECT_RESULTS, RECORD - 1 + i, int(np.array([own.label, 1], np.uint32).view(np.uint64)[0]), 0)
        else:
            name, value = {
                "released": ("released", A.label),
                "results move on": ("result_base", B.result_seq),
                "sums move on": ("sum_base", B.seq),
            }[action.name]
            old = self.layout.get(state, f"control.{name}")
            offset = DTYPES["tb_control"].fields[name][1]  # type: ignore[index]
            values = (_CONTROL, offset, self._wide(name, value), self._wide(name, old))
        turn["kind"], turn["index"], turn["value"], turn["old"] = values

    def run(self, pairs: Sequence[Pair], delay: tuple[int, int]) -> list[Outcome]:
        """All pairs, one after the other; they start from states with one control record.

        ``delay``: by how many short rounds each CPU waits once both are there.
        """
        n = len(pairs)
        assert n <= MOST
        self._put([pair.state for pair in pairs])
        self.meetings[:] = 0
        self.turns["kind"] = _PACKET
        self.meetings["delay"] = delay
        self.meetings["gone"][[0, *range(n + 1, ROWS)]] = 1
        for i, pair in enumerate(pairs, 1):
            for me, action in enumerate(pair.actions):
                self._turn(2 * i + me, action, i, pair.state)
        barrier = threading.Barrier(2)

        def body(me: int, cpu: int) -> None:
            os.sched_setaffinity(0, {cpu})
            first = bytearray(self.world.frame_of(pairs[0].actions[0].packet or pairs[0].actions[1].packet, 1))
            first[:6] = (1).to_bytes(4, "little") + bytes([me, 0])
            barrier.wait()
            while not self.meetings["gone"][1 : n + 1].all():
                back = run_xdp(self.program, bytes(first), _REPEATS)
                first[:6] = back.data[:6]

        threads = [threading.Thread(target=body, args=pair) for pair in enumerate(sorted(os.sched_getaffinity(0))[:2])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._outcomes(pairs)

    def _outcomes(self, pairs: Sequence[Pair]) -> list[Outcome]:
        n = len(pairs)
        out = np.frombuffer(b"".join(pair.state for pair in pairs), np.uint8).reshape(n, -1).copy()
        for name, _, entries, size in PARTS:
            if name in ("control", "slot_locks", "peer_states"):
                continue
            width = size or self._item(name)
            rows = self.arrays[name][self._rows(name, n)].copy()
            if name in _LABELS:
                self._relabel_all(rows, n, True)
            if name == "ops":
                for hint in HINTS:
                    rows[hint] = 0
            flat = np.ascontiguousarray(rows).view(np.uint8).reshape(n, -1)
            out[:, self._at[name] : self._at[name] + entries * width] = flat[:, : entries * width]
        met = self.meetings[1 : n + 1]
        seen = (met["seen"] & 0xFFFFFFFF).astype(np.uint32)
        for me in range(2):
            self._relabel(seen[:, me], n, True)
        return [
            Outcome(
                row.tobytes(),
                tuple(None if v == _GO_ON else v for v in verdicts),  # type: ignore[arg-type]
                tuple(names),  # type: ignore[arg-type]
            )
            for row, verdicts, names in zip(out, met["verdict"].tolist(), seen.tolist(), strict=True)
        ]
