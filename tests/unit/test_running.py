"""Which running ops have news (``collective.running``); the simulation compares it with the full look in every turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tailbound.codec.owners import OwnerMap
from tailbound.codec.scratch import readonly
from tailbound.codec.shape import shape_for
from tailbound.collective.buffers import Buffers
from tailbound.collective.op import Launch, Op, Phase, Sending
from tailbound.collective.running import Running
from tailbound.datapath.store import allocate
from tailbound.transport.sequence import Layout, Sequence
from tailbound.wire.schema import op_slot

MS, COOKIE, RANKS = 1_000_000, 7, 3


class Rank:
    """Rank 0 of three with ops in flight, all rows of the kernel's tables in reach."""

    def __init__(self) -> None:
        arrays = allocate(64, 64, 64)
        self.states, self.records = arrays["peer_states"], arrays["ops"]
        self.live = [1, 2]
        self.known: Any = SimpleNamespace(
            cookie=COOKIE, world=RANKS, peers=[1, 2], self_late=False,
            records=SimpleNamespace(peer_states=self.states, ops=readonly(self.records)),
            membership=SimpleNamespace(
                contribution=SimpleNamespace(suspects=frozenset()), result=SimpleNamespace(suspects=frozenset()),
                gone=set(), changes=0, owners=self.live,
            ),
            deadlines=SimpleNamespace(quiet=MS, start_max=400 * MS),
        )  # fmt: skip
        self.running = Running(self.known)
        self._sequence = Sequence(RANKS, OwnerMap(0, (0, 1, 2)), 5)
        self.ops: list[Op] = []

    def op(self, *, launched: bool = True) -> Op:
        """One more in flight, whose own rows have been sent if it is ``launched``."""
        shape = shape_for(64 * 60, 64)
        placed, _ = self._sequence.assign(Layout((len(self.ops), 64 * 60, 0, 1), shape, 7, False))
        made = Op(placed, Buffers(shape, placed.placement, 0, RANKS))
        if launched:
            data = np.zeros(64 * 60, np.float32)
            made.launch = Launch(placed.layout, data, data, lambda outcome: None, MS)
            made.admitted, made.sending = MS, Sending.OVER
        self.ops.append(made)
        self.running.add(made)
        return made

    def record(self, op: Op) -> Any:
        """Of the kernel, made if there is none."""
        found = self.records[op_slot(op.label)]
        found["cookie"], found["op"] = COOKIE, op.label
        return found

    def own(self, op: Op) -> int:
        return int(op.place.placement.counts[0])

    def looked(self, op: Op, look: int = 0) -> None:
        """A full look, as ``Transpose`` takes one: ``find`` first."""
        self.news(0)
        self.running.looked(op, SimpleNamespace(own=self.own(op)), look)  # type: ignore[arg-type]

    def news(self, now: int) -> list[Op]:
        self.running.find(now)
        return [op for op in self.ops if self.running.has_news(op)]


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_an_op_is_looked_at_when_it_is_new_when_it_is_time_and_when_something_has_changed_it(rank: Rank) -> None:
    op = rank.op()
    assert rank.news(2 * MS) == [op]
    rank.looked(op, 9 * MS)
    assert rank.running.find(8 * MS) == 9 * MS
    assert rank.news(8 * MS) == []
    assert rank.news(9 * MS) == [op]
    rank.looked(op, 12 * MS)
    assert rank.news(9 * MS) == []
    op.stirred = True
    assert rank.news(9 * MS) == [op]


def test_rows_are_news_when_a_half_may_be_over_by_them(rank: Rank) -> None:
    """Rules: clock-7a, clock-12. While rows come an op has nothing to do, and there are many."""
    op = rank.op()
    record, own = rank.record(op), rank.own(op)
    rank.looked(op)
    record["progress"], record["rows_complete"] = 5, own - 1
    assert rank.news(MS) == []
    record["rows_complete"] = own
    assert rank.news(MS) == [op]
    assert rank.news(MS) == [op]  # until it is sealed, since the count may have to be checked
    op.first.phase = Phase.CLOSED
    rank.looked(op)
    record["results_in"] = op.place.layout.shape.rows - own - 1
    assert rank.news(MS) == []
    record["results_in"] += 1
    assert rank.news(MS) == [op]


def test_all_ops_have_news_when_who_is_waited_for_or_what_was_learned_changes(rank: Rank) -> None:
    rank.running.changed()
    assert not rank.running.changed()
    rank.known.membership.changes += 1
    assert rank.running.changed()
    rank.known.self_late = True
    assert rank.running.changed()
    rank.known.deadlines.quiet += 1
    assert rank.running.changed()
    assert not rank.running.changed()


def test_flows_are_looked_at_when_it_is_time_and_when_something_has_changed_their_op(rank: Rank) -> None:
    op, other = rank.op(), rank.op()
    for each in (op, other):
        rank.looked(each)
    op.listen, other.listen = 5 * MS, 7 * MS
    assert rank.running.silent(rank.ops, 4 * MS) == ([], 5 * MS)
    assert rank.running.silent(rank.ops, 5 * MS) == ([op], 7 * MS)
    other.stirred = True
    assert rank.running.silent(rank.ops, 4 * MS) == ([other], 5 * MS)
    rank.looked(other)
    assert rank.running.silent(rank.ops, 4 * MS) == ([other], 5 * MS)
    other.second.phase = Phase.CLOSED
    rank.looked(other)
    assert rank.running.silent(rank.ops, 9 * MS) == ([op], 0)


def test_more_ops_than_rows_and_rows_used_again(rank: Rank) -> None:
    for _ in range(40):
        rank.looked(rank.op())
    assert rank.news(MS) == []
    assert len({op.row for op in rank.ops}) == 40
    gone = rank.ops.pop(3)
    rank.running.remove(gone)
    new = rank.op()
    assert new.row == gone.row
    assert rank.news(MS) == [new]
