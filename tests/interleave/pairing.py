"""Which pairs of actions two CPUs are to do at once, what one after the other gives, and what may come of both."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from interleave.explorer import Walker, explored
from interleave.pairs import MOST, Outcome, Pair, PairTables
from interleave.scene import ACTIONS, CODES, SCENES, SUM_BYTES, Action
from interleave.tables import Layout, verdict_of
from interleave.view import View
from tailbound.wire.schema import Verdict

#: Moves of the host that are more than one word: packets may see one of them without the other, and do no harm.
_WORDS = ("3 is out", "3 is back", "new map")
#: Verdicts by which a result's op is there.
_THERE = (Verdict.RESULT_TAKEN, Verdict.DUPLICATE_RESULT, Verdict.DUPLICATE_REPAIR_RESULT)
_SUM = (("slots", 64), ("sums", SUM_BYTES))
_RESULT = (("result_records", 32), ("presence", 8), ("results", CODES))
Verdicts = tuple[int | None, int | None]
_Done = tuple[bytes, int | None]


def pairs_of(scene: str, reached: int, most: int) -> Iterator[Pair]:
    """Every pair of actions of which one changes something, in ``most`` states spread over the first ``reached``."""
    walker = Walker()
    actions = [ACTIONS[name] for name in SCENES[scene] if name not in _WORDS]
    states = explored(scene, reached).states
    for state in states[:: max(1, len(states) // most)]:
        view = walker.view(state)
        may = [action for action in actions if action.may(view)]
        first = [_do(walker, state, action) for action in may]
        for i, a in enumerate(may):
            for j in range(i, len(may)):
                b = may[j]
                if (i == j and not a.packet) or (not a.packet and not b.packet):
                    continue
                if first[i][0] == state and first[j][0] == state:
                    continue
                then_b = first[j] if first[i][0] == state else _do(walker, first[i][0], b)
                then_a = first[i] if first[j][0] == state else _do(walker, first[j][0], a)
                yield Pair(
                    state,
                    (a, b),
                    (
                        Outcome(then_b[0], (first[i][1], then_b[1])),
                        Outcome(then_a[0], (then_a[1], first[j][1])),
                    ),
                )


def _do(walker: Walker, state: bytes, action: Action) -> _Done:
    walker.tables.put(state)
    gained, _ = walker.tables.do(action)
    verdict = verdict_of(gained)
    return walker.tables.take(), None if verdict is None else int(verdict)


def kind_of(pair: Pair, layout: Layout) -> object:
    """What pairs that are alike have in common: actions, verdicts, what they change and what the order changes."""
    a, b = pair.orders
    return (
        pair.actions[0].name,
        pair.actions[1].name,
        a.verdicts,
        b.verdicts,
        layout.changed(pair.state, a.state),
        layout.changed(a.state, b.state),
    )


def misfit(pair: Pair, outcome: Outcome, layout: Layout) -> str | None:
    """What of an outcome neither order gives.

    Sum, result and verdicts are together those of one order. The record of an op is written in several critical
    sections: each of its fields is that of one order.
    """
    orders = [(layout.timeless(o.state), o.verdicts) for o in pair.orders]
    state = layout.timeless(outcome.state)
    own = slice(layout.at["slots"], layout.at["peer_states.1"])  # what pairs do not share
    whole = any(state[own] == s[own] and outcome.verdicts == v for s, v in orders)
    return _unseen(pair, outcome) if whole else _apart(pair, outcome, layout, orders, state)


def _apart(
    pair: Pair, outcome: Outcome, layout: Layout, orders: list[tuple[bytes, Verdicts]], state: bytes
) -> str | None:
    """The same for an outcome that is not in all parts that of one order."""

    def rows(of: bytes) -> list[bytes]:
        return [layout.part(of, name, size) for name, size in (*_SUM, *_RESULT)]

    if not any(rows(state) == rows(s) and outcome.verdicts == v for s, v in orders):
        changed = sorted(layout.changed(orders[0][0], state))
        return f"verdicts {outcome.verdicts}; other than in the first order: {changed}"
    views = [View(layout, s) for s, _ in orders]
    mine = View(layout, state)
    for name in layout.fields():
        if name.startswith(("ops.", "arrivals.", "expect_results.")):
            here = mine.get(name)
            if here not in [view.get(name) for view in views]:
                return f"{name} is {here:#x}, by the orders {[hex(view.get(name)) for view in views]}"
    return _unseen(pair, outcome)


def _unseen(pair: Pair, outcome: Outcome) -> str | None:
    """A result that a CPU was told is there, while presence did not say so."""
    for action, verdict, seen in zip(pair.actions, outcome.verdicts, outcome.seen, strict=True):
        if action.kind == "result" and verdict in _THERE and seen < action.op.label:
            return f"{action.name}: {Verdict(verdict)!r}, and nobody sees the row"
    return None


def check(tables: PairTables, pairs: Iterable[Pair], delays: Sequence[tuple[int, int]]) -> int:
    """Does all pairs with every delay; how often it mattered who was first, and the second of the pair was.

    Raises:
        AssertionError: an outcome that neither order gives.
    """
    layout = tables.layout
    by_control: dict[bytes, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_control[layout.part(pair.state, "control", 104)].append(pair)
    second = 0
    for alike in by_control.values():
        for at in range(0, len(alike), MOST):
            batch = alike[at : at + MOST]
            for delay in delays:
                for pair, outcome in zip(batch, tables.run(batch, delay), strict=True):
                    wrong = misfit(pair, outcome, layout)
                    names = [action.name for action in pair.actions]
                    assert wrong is None, f"{names} at once, the second {delay} later: {wrong}; in {pair.state.hex()}"
                    first, other = pair.orders
                    second += outcome.verdicts == other.verdicts != first.verdicts
    return second


@functools.cache
def kinds_of_pairs(scene: str, reached: int, most: int) -> list[Pair]:
    """A pair of every kind that ``pairs_of`` gives."""
    layout = Walker().tables.layout
    out: dict[object, Pair] = {}
    for pair in pairs_of(scene, reached, most):
        out.setdefault(kind_of(pair, layout), pair)
    return list(out.values())
