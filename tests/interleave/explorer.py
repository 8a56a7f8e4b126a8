"""Breadth first through all states: what is broken is shown by the fewest actions that break it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from interleave.invariants import Announcements, books_balance, nothing_lost, promises_kept, state_is_sound
from interleave.scene import ACTIONS, SCENES, Action
from interleave.tables import Explored, verdict_of
from interleave.view import View
from tailbound.datapath.tables import Tables
from tailbound.wire.schema import Verdict


class Broken(AssertionError):
    """An invariant does not hold; ``actions`` are the fewest that show it."""

    def __init__(self, what: str, actions: Sequence[str]) -> None:
        self.what = what
        self.actions = tuple(actions)
        lines = "".join(f"    {name!r},\n" for name in actions)
        super().__init__(f"{what}; repeat it by\nreplay([\n{lines}])")


@dataclass(frozen=True)
class Step:
    """What one action did in one state."""

    state: bytes
    known: int
    verdict: Verdict | None
    gained: tuple[tuple[int, int], ...]
    events: tuple[tuple[int, int], ...]
    changed: frozenset[str]  #: what words of the state hold that have changed


class Walker:
    """Does one action after another in the real tables, and looks at every invariant.

    ``make`` gives other tables than the product's.
    """

    def __init__(self, make: Callable[[Any], Any] = Tables, **control: int) -> None:
        self.tables = Explored(make)
        self.tables.control(**control)
        self.start = self.tables.take()
        self._array = {name: self.tables.layout.array(name) for name in self.tables.layout.words}

    def view(self, state: bytes) -> View:
        return View(self.tables.layout, state)

    def step(self, before: View, known: int, action: Action) -> tuple[Step, str | None]:
        """From ``before``; what was done, and what is broken."""
        self.tables.put(before.state)
        gained, events = self.tables.do(action)
        state = self.tables.take()
        after = before if state == before.state else self.view(state)
        changed = self.tables.layout.changed(before.state, state)
        arrays = frozenset(self._array[name] for name in changed)
        wrong = next(self._complaints(before, after, action, gained, arrays), None)
        known, false = Announcements.step(known, before, after, gained, events)
        return Step(state, known, verdict_of(gained), gained, events, changed), wrong or false

    @staticmethod
    def _complaints(
        before: View, after: View, action: Action, gained: tuple[tuple[int, int], ...], arrays: frozenset[str]
    ) -> Iterator[str]:
        if arrays:
            yield from state_is_sound(after, arrays)
            yield from nothing_lost(before, after, arrays)
        if action.packet:
            yield from books_balance(before, after, action, gained, arrays)
            yield from promises_kept(before, after, action)


def replay(names: Sequence[str], walker: Walker | None = None) -> list[Verdict | None]:
    """Does actions in this order from the start; their verdicts (None: a move of the host).

    Raises:
        Broken: an invariant does not hold after one of them.
    """
    walker = walker or Walker()
    state, known, verdicts = walker.start, 0, []
    for i, name in enumerate(names):
        view = walker.view(state)
        assert ACTIONS[name].may(view), f"the host would not do {name!r} now"
        step, wrong = walker.step(view, known, ACTIONS[name])
        if wrong:
            raise Broken(wrong, names[: i + 1])
        state, known = step.state, step.known
        verdicts.append(step.verdict)
    return verdicts


#: A kind of transition: the action, its verdict, what was counted, events, and what of the tables changed.
Kind = tuple[str, Verdict | None, tuple[tuple[int, int], ...], tuple[int, ...], frozenset[str]]


@dataclass
class Exploration:
    """What was reached.

    Attributes:
        states: distinct states, in the order in which they were found.
        whole: whether all there are.
        transitions: actions done.
        kinds: the first (state, action, step) of every kind of transition.
    """

    states: list[bytes] = field(default_factory=list)
    whole: bool = False
    transitions: int = 0
    kinds: dict[Kind, tuple[bytes, Action, Step]] = field(default_factory=dict)


def explore(scene: str, most: int, walker: Walker | None = None) -> Exploration:
    """Every order of a scene's actions, until there is no new state or ``most`` of them have been gone on from.

    Raises:
        Broken: an invariant does not hold.
    """
    walker = walker or Walker()
    actions = [ACTIONS[name] for name in SCENES[scene]]
    out = Exploration()
    nodes: list[tuple[bytes, int, int, Action | None]] = [(walker.start, 0, -1, None)]
    seen = {(walker.start, 0)}
    at = 0

    def path(i: int) -> list[str]:
        names: list[str] = []
        while i > 0:
            action = nodes[i][3]
            assert action is not None
            names.append(action.name)
            i = nodes[i][2]
        return names[::-1]

    while at < min(len(nodes), most):
        state, known = nodes[at][:2]
        before = walker.view(state)
        for action in actions:
            if not action.may(before):
                continue
            step, wrong = walker.step(before, known, action)
            out.transitions += 1
            if wrong:
                raise Broken(wrong, [*path(at), action.name])
            kind = (action.name, step.verdict, step.gained, tuple(k for k, _ in step.events), step.changed)
            if kind not in out.kinds:
                out.kinds[kind] = (state, action, step)
            if (step.state, step.known) not in seen:
                seen.add((step.state, step.known))
                nodes.append((step.state, step.known, at, action))
        at += 1
    spilled = walker.tables.spilled()
    assert not spilled.size, f"words outside of the states have changed: {spilled[:8]}"
    out.states = list(dict.fromkeys(node[0] for node in nodes))
    out.whole = at == len(nodes)
    return out


#: States of a scene from which every action is done, every day; kinds of transitions and of pairs are those seen there.
EVERY_DAY = {"sums": 1500, "records": 1500, "results": 1500, "all": 400}


@functools.cache
def explored(scene: str, most: int) -> Exploration:
    """The same, once for all who ask: it takes longer than what they do with it."""
    return explore(scene, most)
