"""Pairs of actions at once, by two CPUs in the kernel program: what comes of both is what one of the orders gives."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interleave.scene import ACTIONS, RECORD, RESULT_ROW, SCENES, SLOT, Action
from interleave.tables import HINTS, STATE, Tables, explored, fields_of, may, timeless
from kernel_world import DEFINES, KernelWorld
from tailbound.kernel import load, syscalls
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import Verdict
from tailbound_lab.bench.program_run import run_xdp
from udp_world import World

SOURCE = Path(__file__).parents[1] / "kernel" / "pairs.bpf.c"
#: Pairs that are done without a return from the kernel.
_MOST = 1024
#: As in the program (``struct tb_meeting``).
_MEETING = np.dtype(
    [
        *((name, "u4", 2) for name in ("ready", "here", "gone", "delay", "verdict", "kind", "at")),
        *((name, "u8", 2) for name in ("value", "seen")),
        ("frame", "u1", (2, 112)),
        ("state", STATE),
    ]
)
_KINDS = ("packet", "seal", "expect", "control")
_GO_ON = 0x101
#: Runs of the program in one system call; a CPU that waits for the other one uses them up.
_REPEATS = 20_000
#: Moves of the host that are more than one word: packets may see one of them without the other, and do no harm.
_WORDS = ("3 is out", "3 is back", "new map")
#: Written under one lock each, unlike the record of an op, of which each field is that of one order.
_TOGETHER = ("slots.", "sums", "result_records.", "presence.", "results")
#: Verdicts by which a result's op is there.
_THERE = (Verdict.RESULT_TAKEN, Verdict.DUPLICATE_RESULT, Verdict.DUPLICATE_REPAIR_RESULT)


Verdicts = tuple[Verdict | None, Verdict | None]


@dataclass(frozen=True)
class Pair:
    """Two actions in a state, and what they do in either order: the state at the end, and the verdict of each."""

    state: bytes
    actions: tuple[Action, Action]
    states: tuple[bytes, bytes]
    verdicts: tuple[Verdicts, Verdicts]

    @property
    def kind(self) -> object:
        """What pairs that are alike have in common: actions, verdicts, and words that they and their order change."""
        before, one, other = (np.frombuffer(state, np.uint64) for state in (self.state, *self.states))
        names = tuple(action.name for action in self.actions)
        return names, self.verdicts, (before != one).tobytes(), (one != other).tobytes()


def pairs_of(scene: str, reached: int, most: int) -> Iterator[Pair]:
    """Every pair of actions of which one changes something, in ``most`` states spread over the first ``reached``."""
    tables = Tables(World())
    states = explored(scene, reached).states
    for state in states[:: max(1, len(states) // most)]:
        actions = [ACTIONS[name] for name in SCENES[scene] if name not in _WORDS and may(state, ACTIONS[name])]
        first = [tables.do(state, action) for action in actions]
        for i, a in enumerate(first):
            for b in first[i:]:
                if (a.action.packet or b.action.packet) and not a.after == b.after == state:
                    then_b, then_a = tables.do(a.after, b.action), tables.do(b.after, a.action)
                    verdicts = (a.verdict, then_b.verdict), (then_a.verdict, b.verdict)
                    yield Pair(state, (a.action, b.action), (then_b.after, then_a.after), verdicts)


def kinds_of_pairs(scene: str, reached: int, most: int) -> list[Pair]:
    """The first of every kind."""
    kinds = dict[object, Pair]()
    for pair in pairs_of(scene, reached, most):
        kinds.setdefault(pair.kind, pair)
    return list(kinds.values())


class Both:
    """A program that does the actions of pairs on two CPUs, over the maps of a world."""

    def __init__(self, world: KernelWorld, loader: str) -> None:
        self._world = world
        self._held, self._fds = contextlib.ExitStack(), dict[str, int]()
        self._meetings, self._turns = self._map("meetings", _MEETING, _MOST), self._map("turns", np.dtype("u8"), 2)
        text = zlib.crc32(SOURCE.read_bytes()) & 0x7FFFFFFF  # what is kept compiled goes by the package's sources
        places = {"TB_PAIR_SLOT": SLOT, "TB_PAIR_ROW": RESULT_ROW, "TB_PAIR_RECORD": RECORD}
        names = (*load.WORKER_MAP_NAMES, "meetings", "turns")
        defines, fds = DEFINES | places | {"TB_PAIRS": text}, world.maps.fds | self._fds
        self._program = load.load(str(SOURCE), "tb_pairs", defines, names, fds, loader)
        self._held.callback(os.close, self._program)

    def _map(self, name: str, dtype: np.dtype[Any], entries: int) -> NDArray[Any]:
        kind, flags = syscalls.MAP_TYPE_ARRAY, syscalls.F_MMAPABLE
        fd = syscalls.map_create(kind, 4, dtype.itemsize, entries, name=f"tb_{name}", flags=flags)
        self._held.callback(os.close, fd)
        self._fds[name] = fd
        return np.frombuffer(
            mmap.mmap(fd, -(-entries * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE), dtype, entries
        )

    def close(self) -> None:
        self._held.close()

    def check(self, pairs: Sequence[Pair], delays: Iterable[tuple[int, int]]) -> int:
        """Does all pairs; how often it mattered who was first, and the second of the pair was.

        ``delays``: by how many short rounds each CPU waits once both are there.
        """
        second = 0
        for at, delay in itertools.product(range(0, len(pairs), _MOST), delays):
            batch = pairs[at : at + _MOST]
            found = self._run(batch, delay)
            orders = [timeless(*states) for states in zip(*(pair.states for pair in batch), strict=True)]
            for pair, met, state, *wanted in zip(batch, self._meetings, found, *orders, strict=False):
                verdicts = _verdict(met["verdict"][0]), _verdict(met["verdict"][1])
                wrong = misfit(state, verdicts, list(zip(wanted, pair.verdicts, strict=True)))
                for action, verdict, word in zip(pair.actions, verdicts, met["seen"].tolist(), strict=True):
                    if action.kind == "result" and verdict in _THERE and word & 0xFFFFFFFF < action.op.label:
                        wrong = f"{action.name}: {verdict!r}, and presence does not say so"
                names = [action.name for action in pair.actions]
                assert not wrong, f"{names} at once, {delay} later: {wrong}; in {pair.state.hex()}"
                first, other = pair.verdicts
                second += verdicts == other != first
        return second

    def _run(self, pairs: Sequence[Pair], delay: tuple[int, int]) -> NDArray[Any]:
        """States afterwards; the rest is in the meetings."""
        self._meetings[:] = 0
        self._meetings["delay"] = delay
        for pair, meeting in zip(pairs, self._meetings, strict=False):
            meeting["state"] = np.frombuffer(pair.state, STATE)[0]
            for me, action in enumerate(pair.actions):
                meeting["kind"][me], meeting["at"][me], meeting["value"][me] = _turn(action)
                if action.packet:
                    frame = self._world.frame_of(action.packet, action.sender)
                    meeting["frame"][me, : len(frame) - 12] = np.frombuffer(frame, np.uint8)[12:]
        self._turns[:] = 0

        def act(me: int, cpu: int) -> None:
            os.sched_setaffinity(0, {cpu})
            while self._turns[me] < len(pairs):
                run_xdp(self._program, bytes([me]) + bytes(121), _REPEATS)

        threads = [threading.Thread(target=act, args=each) for each in enumerate(sorted(os.sched_getaffinity(0))[:2])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        states = timeless(self._meetings["state"].tobytes())
        for hint in HINTS:
            states["ops"][hint] = 0
        return states


def _verdict(said: int) -> Verdict | None:
    return None if said == _GO_ON else Verdict(said)


def _turn(action: Action) -> tuple[int, int, int]:
    """What a CPU is to do: its kind, and of a move of the host a byte of the control record and the word to write."""
    if action.packet:
        return 0, 0, 0
    at, word = 0, action.op.label | (action.kind == "expect") << 32
    if action.control:
        ((name, word),) = action.control.items()
        at = DTYPES["tb_control"].fields[name][1]  # type: ignore[index]
    return _KINDS.index(action.kind), at, word


def misfit(state: np.void, verdicts: Verdicts, orders: Sequence[tuple[np.void, Verdicts]]) -> str:
    """What of an outcome neither order gives, or nothing."""
    if any(said == verdicts and after.tobytes() == state.tobytes() for after, said in orders):
        return ""
    found, wanted = fields_of(state), [(fields_of(after), said) for after, said in orders]
    together = [name for name in found if name.startswith(_TOGETHER)]
    if not any(said == verdicts and all(found[name] == of[name] for name in together) for of, said in wanted):
        return f"verdicts {verdicts}, and {[name for name in together if found[name] != wanted[0][0][name]]} differ"
    return ", ".join(name for name in found if found[name] not in [of[name] for of, _ in wanted])
