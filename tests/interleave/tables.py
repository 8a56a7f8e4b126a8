"""The part of a datapath's memory that actions of a scene may change, as bytes; and all states that they lead to."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import cases
from datapath_world import DatapathWorld
from interleave.scene import ACTIONS, CODES, RECORD, RESULT_ROW, SCENES, SENDERS, SLOT, Action
from tailbound.datapath.protocol import layouts
from tailbound.wire.schema import MAX_RANKS, Verdict
from udp_world import World

#: Hints that no rule reads and that only ever rise: left out of states, so that there are finitely many.
HINTS = ("progress", "late", "late_results")
#: Map, first entry, entries, and bytes of each where they are no records. What is sealed is a word of its own.
PARTS: tuple[tuple[str, int, int, int], ...] = (
    ("control", 0, 1, 0),
    ("slots", SLOT, 1, 0),
    ("sums", SLOT, 1, 4 * CODES),  # op B has two codes a byte
    ("result_records", RESULT_ROW, 1, 0),
    ("presence", RESULT_ROW, 1, 0),
    ("results", RESULT_ROW, 1, CODES),
    ("expect_results", RECORD, 1, 0),
    ("ops", RECORD, 1, 0),
    ("arrivals", RECORD * MAX_RANKS + SENDERS[0], len(SENDERS), 0),
    ("peer_states", SENDERS[0], len(SENDERS), 0),
)
_LAYOUTS = layouts(cases.WIDTH, cases.SUM_ROWS, cases.RESULT_ROWS, cpus=1)
STATE = np.dtype(
    [
        ("sealed", "u8"),
        *((name, "u1" if size else _LAYOUTS[name][0], size or (() if n == 1 else n)) for name, _, n, size in PARTS),
    ]
)


def timeless(*states: bytes) -> NDArray[Any]:
    """The same with 1 in place of every time."""
    out = np.frombuffer(b"".join(states), STATE).copy()
    for part in STATE.names or ():
        for field in out[part].dtype.names or ():
            if field.endswith(("_ns", "_us")):
                out[part][field] = out[part][field] != 0
    return out


def fields_of(state: np.void) -> dict[str, bytes]:
    """All fields of a state by name."""
    out = {}
    for name in STATE.names or ():
        part = state[name]
        if not part.dtype.names:
            out[name] = part.tobytes()
            continue
        for i, record in enumerate(np.atleast_1d(part)):
            out |= {f"{name}.{i}.{field}": record[field].tobytes() for field in part.dtype.names}
    return out


@dataclass(frozen=True)
class Step:
    """What an action did: states before and after, its verdict (None: a move of the host), kinds and ops of events."""

    before: bytes
    action: Action
    after: bytes
    verdict: Verdict | None
    events: tuple[tuple[int, int], ...]

    @property
    def kind(self) -> object:
        """What steps that are alike have in common: action, verdict, events, and the words that changed."""
        changed = np.frombuffer(self.before, np.uint64) != np.frombuffer(self.after, np.uint64)
        return self.action.name, self.verdict, tuple(kind for kind, _ in self.events), changed.tobytes()


class Tables:
    """The memory of a world, whose states can be taken and put back."""

    def __init__(self, world: DatapathWorld) -> None:
        self.world = world
        self._memory = []
        for name, first, entries, size in PARTS:
            rows = world.arrays[name][first : first + entries]
            self._memory.append(rows.view(np.uint8).reshape(-1)[: size or rows.nbytes])
        self._hints = [world.arrays["ops"][RECORD : RECORD + 1][name] for name in HINTS]
        self._ledger = world.arrays["ledger"]["verdict"].reshape(-1, 257, 64)
        self.sealed = cases.FIRST_OP - 1

    def put(self, state: bytes) -> None:
        """The memory as in a state."""
        at = 8
        for memory in self._memory:
            memory[:] = np.frombuffer(state, np.uint8, memory.size, at)
            at += memory.size
        self._seal(int.from_bytes(state[:8], "little"))
        self._ledger[:] = 0
        self.world.events()

    def take(self) -> bytes:
        """The state of the memory."""
        for hint in self._hints:
            hint[0] = 0
        return b"".join((self.sealed.to_bytes(8, "little"), *(memory.tobytes() for memory in self._memory)))

    def _seal(self, op: int) -> None:
        self.world.seal(op, cases.SUM_BASE, 1)
        self.sealed = op

    def do(self, state: bytes, action: Action) -> Step:
        """An action in a state; a packet is counted once, for its sender."""
        self.put(state)
        if action.packet:
            self.world.receive(action.packet, action.sender)
            verdict, sender = cases.judged(self._ledger.sum(0))
            assert sender == action.sender, f"{action.name} is counted for {sender}"
            return Step(state, action, self.take(), verdict, tuple(event[:2] for event in self.world.events()))
        if action.kind == "seal":
            self._seal(action.op.label)
        elif action.kind == "expect":
            self.world.store.expect_results[RECORD] = (action.op.label, 1)
        self.world.control(**action.control)
        return Step(state, action, self.take(), None, ())


class Exploration(NamedTuple):
    """States in the order in which they were found, whether they are all, and the first step of every kind."""

    states: list[bytes]
    whole: bool
    kinds: list[Step]


def may(state: bytes, action: Action) -> bool:
    """Whether the host would do that now; packets may always come."""
    now = np.frombuffer(state, STATE)[0]
    return action.may(now["control"], now["sealed"], now["expect_results"]["op"])


#: Of the states of a scene, so many from which every action is done, every day.
EVERY_DAY = {"sums": 1500, "records": 1500, "results": 1500, "all": 400}


@functools.cache
def explored(scene: str, most: int) -> Exploration:
    """Every order of a scene's actions in the udp datapath, until ``most`` states have been gone on from."""
    world = World()
    tables, now, actions = Tables(world), world.clock, [ACTIONS[name] for name in SCENES[scene]]
    states = [tables.take()]
    memory = {name: array.copy() for name, array in world.arrays.items()}
    seen, kinds = set(states), dict[object, Step]()
    for state in itertools.islice(states, most):
        for action in (action for action in actions if may(state, action)):
            world.clock = now  # states differ by what happened, not by when
            step = tables.do(state, action)
            kinds.setdefault(step.kind, step)
            if step.after not in seen:
                seen.add(step.after)
                states.append(step.after)
    tables.put(states[0])
    for name, array in world.arrays.items():
        assert np.array_equal(array, memory[name]), f"a word of {name} outside of the states has changed"
    return Exploration(states, len(states) <= most, list(kinds.values()))


def check_steps(tables: Tables, steps: Iterable[Step]) -> None:
    """The same verdicts, events and bytes in another world, times aside."""
    for step in steps:
        found = tables.do(step.before, step.action)
        assert (found.verdict, found.events) == (step.verdict, step.events), step.action.name
        after, wanted = timeless(found.after, step.after)
        assert after.tobytes() == wanted.tobytes() or fields_of(after) == fields_of(wanted), step.action.name
