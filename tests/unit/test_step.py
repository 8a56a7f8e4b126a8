"""What is to be done for an op (``collective.step``), which ops have news, and what is said of those that are over."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tailbound.codec.decode import MISSING
from tailbound.codec.owners import OwnerMap
from tailbound.codec.scratch import readonly
from tailbound.codec.shape import shape_for
from tailbound.collective.actions import MOVES, Abstain, Agree, Collect, Encode, Finish, Measure, Seal, StayOut, Tell
from tailbound.collective.buffers import Buffers
from tailbound.collective.op import AGREEING, Launch, Op, Phase, Sending
from tailbound.collective.repair import Repairs
from tailbound.collective.running import Running
from tailbound.collective.step import Step, overtaken, recover, stand_still, start_clock, step
from tailbound.collective.view import View
from tailbound.collective.window import Window
from tailbound.datapath.store import allocate
from tailbound.transport.config import FLOOR
from tailbound.transport.membership import Membership
from tailbound.transport.overtime import Extension, Overtime
from tailbound.transport.recovery import NEVER, Bounds, Recovery, Ring, paths
from tailbound.transport.sequence import Layout, Sequence
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import op_slot

MS = 1_000_000
RANKS, ENTRIES = 3, 64 * 60
SCALES = np.zeros(1, np.int16)
Q, D1, R, STAGE_MAX, START_MAX = 1 * MS, 50 * MS, 100 * MS, 500 * MS, 400 * MS


@dataclass
class Told:
    """What rank 0 of three is told of an op; the same names as ``collective.view.View``."""

    op: Op
    scales: bool = True
    record: dict[str, Any] | None = None
    contributed_by: set[int] = field(default_factory=set)
    published_by: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.own = int(self.op.place.placement.counts[0])
        self.paths = paths(RANKS, FLOOR)
        self.known = SimpleNamespace(
            rank=0, ranks=RANKS, world=RANKS, peers=[1, 2],
            membership=Membership(RANKS, 0), live_since=0, self_late=False, overtime=Overtime(0),
            silent_since=lambda ranks, now: 0, repairs=Repairs(RANKS),
            scales=lambda op: SCALES if self.scales else None,
            config=SimpleNamespace(stage_max=STAGE_MAX, floor=FLOOR, repair=True, insist=0),
            deadlines=SimpleNamespace(quiet=Q, start_max=START_MAX, advertised=D1),
            store=SimpleNamespace(control={"need": np.array([2])}),
        )  # fmt: skip

    def foreseen_wrongly(self) -> bool:
        return self.record is not None and self.record["layout"] != self.op.place.layout.tag

    def contributed(self, rank: int) -> bool:
        return rank in self.contributed_by

    def published(self, rank: int) -> bool:
        return rank in self.published_by

    def brings_no_more(self, rank: int) -> bool:
        return rank in self.op.abstainers or self.contributed(rank)

    def all_contributed(self, ranks: list[int]) -> list[int]:
        return [p for p in ranks if self.contributed(p)]

    def all_published(self, ranks: list[int]) -> list[int]:
        return [p for p in ranks if self.published(p)]

    owners, givers, through = View.owners, View.givers, View.through

    def first_deadline(self) -> int:
        return D1

    def second_deadline(self) -> int:
        return R

    def recovery(self, *, results: bool) -> Recovery:
        """Nothing has come."""
        self.memory = np.zeros(1024, DTYPES["tb_presence" if results else "tb_slot"])
        self.memory["op"], self.memory["cookie"] = self.op.label, 1 - results
        at = self.memory.ctypes.data
        bounds = Bounds(NEVER if results else FLOOR, late=False, step=FLOOR, look=MS, floor=FLOOR)
        return Recovery(bounds, Ring(*((0, at) if results else (at, 0)), 1023, 0, self.op.label, 1), self.paths)

    def take(self, now: int, *, may_send: bool = True) -> Step:
        return step(self.op, self, now, may_send=may_send)  # type: ignore[arg-type]


def launched(sequence: Sequence, index: int = 0) -> Op:
    """The op of that index in a step of ``sequence``, which rank 0 has launched at 1 ms."""
    shape, data = shape_for(ENTRIES, 64), np.zeros(ENTRIES, np.float32)
    placed, _ = sequence.assign(Layout((index, ENTRIES, 0, 1), shape, 7, False))
    made = Op(placed, Buffers(shape, placed.placement, 0, RANKS))
    made.launch = Launch(placed.layout, data, data, lambda outcome: None, MS)
    made.admitted, made.sending = MS, Sending.LAUNCHED
    return made


@pytest.fixture
def op() -> Op:
    return launched(Sequence(RANKS, OwnerMap(0, (0, 1, 2))))


def record(op: Op, **fields: Any) -> dict[str, Any]:
    """As the kernel keeps it."""
    known: dict[str, Any] = {
        "layout": op.place.layout.tag, "progress": 0, "results_in": 0, "rows_complete": 0, "opened_ns": 1,
        "majority_ns": (0, 0), "begun": np.zeros(4, np.uint64),
    }  # fmt: skip
    return known | fields


# -- the own rows -------------------------------------------------------------------------------------------------


def test_a_device_is_polled_before_own_rows_are_coded_and_before_codes_are_sent(op: Op) -> None:
    """First soon, then after an eighth of the time it has taken, at most a millisecond: nobody spins."""
    done, told = [False], Told(op)
    op.begun, op.ready = 2 * MS, lambda: done[0]
    looks = [told.take(2 * MS + passed).look - 2 * MS - passed for passed in (0, MS, 4 * MS, 80 * MS)]
    assert looks == [MS // 10, MS // 8, MS // 2, MS]
    done[0] = True
    assert told.take(90 * MS).actions == (Encode(SCALES),)
    op.sending, op.begun, done[0] = Sending.CODING, 90 * MS, False
    assert told.take(90 * MS) == ((), 90 * MS + MS // 10)
    done[0] = True
    assert told.take(91 * MS).actions == (Collect(),)
    assert Collect in MOVES


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([Step(look=5), Step(look=3), Step(look=4)], Step(look=3)),
        ([Step(look=5), Step(), Step((Tell((1,)),))], Step((Tell((1,)),), 5)),
        ([Step(), Step((Tell((1,)),)), Step((Tell((2,)),))], Step((Tell((1,)), Tell((2,))))),
        ([Step((Tell((1,)),), 3), Step((Seal("complete"),)), Step(look=1)], Step((Tell((1,)), Seal("complete")))),
        ([Step(), Step(), Step()], Step()),
    ],
)
def test_parts_do_all_they_have_up_to_a_move_and_the_earliest_look_counts(
    op: Op, monkeypatch: pytest.MonkeyPatch, parts: list[Step], whole: Step
) -> None:
    monkeypatch.setattr("tailbound.collective.step._PARTS", tuple((lambda *_, part=part: part) for part in parts))
    assert Told(op).take(MS) == whole


def test_an_op_that_may_not_send_yet_is_sealed_all_the_same(op: Op) -> None:
    op.sending = Sending.OVER
    told = Told(op)
    told.record = record(op, rows_complete=told.own)
    assert told.take(5 * MS, may_send=False).actions == (Seal("complete"),)


def test_a_rank_that_takes_part_without_rows_says_so(op: Op) -> None:
    assert op.launch is not None
    op.launch.contribute = False
    assert Told(op).take(2 * MS).actions == (Abstain(),)


def test_a_launch_after_the_first_half_stays_out(op: Op) -> None:
    """Rule: clock-17."""
    op.start, op.first.phase = MS, Phase.DONE
    told = Told(op, published_by={1, 2})
    assert told.take(MS + D1).actions == (Encode(SCALES),)
    assert told.take(MS + D1 + 1).actions == (StayOut(),)
    op.start = 1
    assert told.take(D1 + 2).actions == (StayOut(),)
    op.start = 0  # not yet
    assert told.take(MS + D1 + 1).actions == (Encode(SCALES),)


def test_a_late_launch_sends_its_rows_as_long_as_an_owner_may_wait_for_them(op: Op) -> None:
    """Rules: clock-17, clock-29."""
    op.start, op.first.phase = MS, Phase.DONE
    told = Told(op, published_by={1})
    assert told.take(MS + D1 + 1).actions == (Encode(SCALES),)
    assert told.take(MS + STAGE_MAX).actions == (Encode(SCALES),)
    assert told.take(MS + STAGE_MAX + 1).actions == (StayOut(),)  # no owner waits for so long


def test_a_launch_is_in_time_as_long_as_its_own_rows_are_open(op: Op) -> None:
    op.start = MS
    assert Told(op, published_by={1, 2}).take(MS + D1 + 1).actions[0] == Encode(SCALES)


def test_a_switch_still_answers_a_late_launch(op: Op) -> None:
    """Rule: clock-28."""
    op.start, op.first.phase, op.switched = MS, Phase.DONE, True
    told = Told(op, record=record(op))
    assert told.take(MS + D1 + 1).actions == (Encode(SCALES, late=True),)
    told.record = record(op, results_in=op.place.layout.shape.rows)
    assert told.take(MS + D1 + 1).actions == (StayOut(),)


def test_a_cold_op_tells_its_scales_again_to_who_has_not_heard_and_settles_when_all_have_told(op: Op) -> None:
    """Rules: codec-5, clock-25."""
    op.switched, op.first.phase, told = True, Phase.DONE, Told(op, scales=False)
    assert told.take(2 * MS).actions == (Measure(),)
    op.sending, op.cold_since = Sending.AGREEING, 2 * MS
    op.agreeing.ask(2 * MS)
    assert told.take(3 * MS) == Step((), 2 * MS + AGREEING.first)
    op.needs[1] = np.zeros(1, np.int16)
    op.heard_by.add(1)
    assert told.take(4 * MS) == Step((Tell((2,)),), 4 * MS + AGREEING.first)
    op.needs[2] = np.zeros(1, np.int16)
    assert told.take(5 * MS).actions == (Agree(incomplete=False),)
    op.needs.clear()
    op.abstainers |= {1, 2}
    assert told.take(5 * MS).actions == (Agree(incomplete=False),)


def test_a_cold_op_waits_half_a_stage_for_scales_and_a_deadline_for_those_who_have_settled(op: Op) -> None:
    """Rule: clock-26."""
    told = Told(op, scales=False)
    op.sending, op.cold_since, op.agreeing.due = Sending.AGREEING, 2 * MS, 1 << 60
    assert told.take(3 * MS).look == MS + START_MAX + STAGE_MAX // 2
    op.start = 5 * MS
    assert told.take(6 * MS, may_send=True).look == 45 * MS  # of the first half
    op.first.phase = Phase.CLOSED
    assert told.take(6 * MS).look == 5 * MS + STAGE_MAX // 2
    op.start, op.first.phase, op.first.clock = 0, Phase.OPEN, Extension()
    told.contributed_by, told.known.config.repair = {1, 2}, False
    assert told.take(3 * MS).look == 2 * MS + D1
    assert told.take(2 * MS + D1).actions == (StayOut(),)
    told.contributed_by = set()
    assert not told.take(3 * MS).actions
    op.warm.add(1)  # it has said so itself
    assert told.take(3 * MS).actions == (StayOut(),)


def test_a_clock_that_nobody_else_starts_is_looked_at_when_it_starts(op: Op) -> None:
    """Rule: clock-3. Looked at only every 100 ms, of two ranks one paid that much more for the other in every op."""
    told = Told(op)
    assert start_clock(op, told, 2 * MS) == MS + START_MAX  # type: ignore[arg-type]
    assert op.start == 0
    assert start_clock(op, told, MS + START_MAX) == 0  # type: ignore[arg-type]
    assert op.start == MS + START_MAX


def test_a_stamp_that_is_younger_than_the_turn_starts_the_clock_in_the_next_one(op: Op) -> None:
    """Rule: clock-3. Packets come while a turn goes on, and rows wake nobody up."""
    told = Told(op, record=record(op, majority_ns=(3 * MS, 0)))
    assert start_clock(op, told, 2 * MS) == 3 * MS  # type: ignore[arg-type]
    op.launch, op.admitted = None, 0
    assert start_clock(op, told, 2 * MS) == 0  # type: ignore[arg-type]
    told.record = record(op, majority_ns=(3 * MS, 4 * MS))
    assert start_clock(op, told, 2 * MS) == 4 * MS  # type: ignore[arg-type]
    op.second.phase = Phase.CLOSED
    assert start_clock(op, told, 2 * MS) == 0  # type: ignore[arg-type]


# -- both halves --------------------------------------------------------------------------------------------------


def test_an_op_is_sealed_when_all_is_in_and_only_then_finished(op: Op) -> None:
    """Rules: clock-7a, clock-12."""
    op.sending = Sending.OVER
    told = Told(op)
    told.record = record(op, rows_complete=told.own, results_in=op.place.layout.shape.rows)
    assert told.take(5 * MS).actions == (Seal("complete"),)
    op.first.phase = Phase.CLOSED
    assert told.take(5 * MS).actions == (Finish("complete"),)
    op.second.phase = Phase.CLOSED
    assert told.take(5 * MS) == Step()


def test_an_op_is_not_finished_before_its_own_rows_are_sealed_and_sent(op: Op) -> None:
    told = Told(op, record=record(op, results_in=op.place.layout.shape.rows))
    op.sending = Sending.OVER
    assert told.take(5 * MS).actions == ()
    op.first.phase = Phase.CLOSED
    assert told.take(5 * MS).actions == (Finish("complete"),)
    op.sending = Sending.LAUNCHED
    assert told.take(5 * MS, may_send=False).actions == ()
    op.sending, op.launch = Sending.OVER, None
    assert told.take(5 * MS).actions == ()


def test_before_the_clock_starts_no_half_has_a_deadline(op: Op) -> None:
    op.sending, op.held = Sending.OVER, 1
    for op.first.phase in (Phase.OPEN, Phase.CLOSED):
        assert Told(op, record=record(op)).take(10_000 * MS) == ((), 0)
    assert op.first.clock.due == op.second.clock.due == 0


def test_the_second_half_has_twice_as_long_as_the_first_at_most(op: Op) -> None:
    """Rule: clock-11."""
    op.sending, op.start = Sending.OVER, 10 * MS
    told = Told(op, record=record(op))
    told.take(20 * MS)
    op.first.phase = Phase.CLOSED
    told.take(20 * MS)
    assert (op.first.clock.due, op.first.clock.limit) == (10 * MS + D1, 10 * MS + STAGE_MAX)
    assert (op.second.clock.due, op.second.clock.limit) == (10 * MS + R, 10 * MS + 2 * STAGE_MAX)


def test_lost_results_are_insisted_on_past_the_deadline(op: Op) -> None:
    """Of owners that have published: rank 2 has not. Until all have come, none is to be had, or in time.

    Rule: clock-35.
    """
    op.sending, op.start, op.first.phase = Sending.OVER, 10 * MS, Phase.CLOSED
    told = Told(op, record=record(op), published_by={1})
    told.known.config.insist, now = 20 * MS, 10 * MS + R
    op.buffers.source[:], told.known.overtime = MISSING, Overtime(now)
    told.take(now - MS)
    recover(op, told, now - MS)  # type: ignore[arg-type]
    assert op.second.recovery is not None
    assert told.take(now).actions == ()
    assert told.take(now + 1) == Step((), now + 20 * MS)
    assert told.take(now + 20 * MS).actions == (Finish("deadline"),)
    told.record = record(op, results_in=op.place.layout.shape.rows)
    assert told.take(now + 1).actions == (Finish("complete"),)
    told.record = record(op)
    op.second.recovery.gone(1, np.arange(op.place.placement.shares[1]))
    recover(op, told, now + 1)  # type: ignore[arg-type]
    assert told.take(now + 1).actions == (Finish("deadline"),)


@pytest.mark.parametrize("switched", [False, True])
def test_who_lives_is_waited_for_past_the_deadline_but_not_where_a_switch_sums(op: Op, switched: bool) -> None:
    """Rule: clock-29."""
    op.sending, op.start, op.switched = Sending.OVER, 10 * MS, switched
    told = Told(op, record=record(op))
    told.known.silent_since = lambda ranks, now: 59 * MS
    told.take(50 * MS)
    assert told.take(60 * MS).actions == ((Seal("deadline"),) if switched else ())


def test_a_launched_op_is_sealed_although_others_name_another_layout(op: Op) -> None:
    op.sending = Sending.OVER
    told = Told(op)
    told.record = record(op, layout=op.place.layout.tag ^ 1, rows_complete=told.own)
    assert told.take(5 * MS).actions == (Seal("complete"),)


def test_an_op_that_is_not_launched_is_sealed_at_its_deadline_unless_it_was_foreseen_wrongly(op: Op) -> None:
    """Rule: clock-7c."""
    op.launch, op.sending, op.start = None, Sending.FORESEEN, 10 * MS
    told = Told(op, record=record(op, layout=op.place.layout.tag ^ 1))
    assert told.take(10 * MS + D1) == Step()
    told.record = record(op)
    assert told.take(30 * MS) == Step((), 50 * MS)  # the last step before the deadline
    assert told.take(50 * MS) == Step((), 60 * MS)
    assert told.take(60 * MS).actions == (Seal("deadline"),)


# -- clocks -------------------------------------------------------------------------------------------------------


def started(op: Op, now: int, need: int = 2, majority: tuple[int, int] | None = None) -> int:
    """The stage clock as it is looked at first at ``now``."""
    told = Told(op, record=majority and record(op, majority_ns=majority))
    told.known.store.control["need"][0] = need
    op.start = 0
    start_clock(op, told, now)  # type: ignore[arg-type]
    return op.start


def test_what_starts_a_clock(op: Op) -> None:
    """Rule: clock-3."""
    assert started(op, 2 * MS) == 0
    assert started(op, 2 * MS, need=1) == MS  # alone, the own launch is the majority
    assert started(op, 3 * MS, majority=(3 * MS, 0)) == 3 * MS
    op.launch = None
    assert started(op, 5000 * MS, majority=(3 * MS, 0)) == 0
    assert started(op, 6 * MS, majority=(3 * MS, 5 * MS)) == 5 * MS


@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("sealed", [False, True])
def test_after_a_hold_deadlines_start_anew(op: Op, switched: bool, sealed: bool) -> None:
    """Rule: clock-16. A switch is asked to release rows at the first half's deadline, whatever is sealed here."""
    op.switched, op.start = switched, 10 * MS
    op.first.phase = Phase.DONE if sealed else Phase.OPEN
    for half in (op.first, op.second):
        half.clock.start(op.start, D1, STAGE_MAX)
    stand_still(op, 700 * MS)
    assert op.start == (10 * MS if sealed else 0)
    assert (op.first.clock.due == 0) == (switched or not sealed)
    assert (op.second.clock.due == 0) == sealed
    start_clock(op, Told(op, record=record(op, majority_ns=(3 * MS, 0))), 701 * MS)  # type: ignore[arg-type]
    assert op.start == 700 * MS


def test_an_op_that_all_others_are_through_with_is_overtaken_once(op: Op) -> None:
    """Rules: clock-13, clock-20."""
    told = Told(op, contributed_by={1, 2}, published_by={1})
    assert not overtaken(op, told, 9 * MS)  # type: ignore[arg-type]
    told.published_by.add(2)
    assert overtaken(op, told, 9 * MS)  # type: ignore[arg-type]
    assert op.start == 1
    assert not overtaken(op, told, 9 * MS)  # type: ignore[arg-type]
    assert told.take(9 * MS).actions == (StayOut(),)


def test_only_a_launch_that_has_not_sent_is_overtaken_and_only_by_owners_that_are_through(op: Op) -> None:
    """Rules: clock-13, clock-20."""
    told = Told(op, contributed_by={1}, published_by={1, 2})
    assert not overtaken(op, told, 9 * MS)  # type: ignore[arg-type]
    told.contributed_by.add(2)
    for rank in (1, 2):
        told.known.membership.bye(rank, 0)
    assert not overtaken(op, told, 9 * MS)  # type: ignore[arg-type]
    for rank in (1, 2):
        told.known.membership.back(rank, 0)
    op.sending = Sending.OVER
    assert not overtaken(op, told, 9 * MS)  # type: ignore[arg-type]
    op.sending, launch, op.launch = Sending.LAUNCHED, op.launch, None
    assert not overtaken(op, told, 9 * MS)  # type: ignore[arg-type]
    op.launch = launch
    assert overtaken(op, told, 4 * STAGE_MAX + 9 * MS)  # type: ignore[arg-type]
    assert op.start == 9 * MS  # long enough ago for everything to be over
    op.overtaken, op.start = False, 5 * MS
    assert overtaken(op, told, 4 * STAGE_MAX + 9 * MS)  # type: ignore[arg-type]
    assert op.start == 5 * MS


# -- which running ops have news ---------------------------------------------------------------------------------


class Rank:
    """Rank 0 of three with ops in flight, all rows of the kernel's tables in reach."""

    def __init__(self) -> None:
        arrays = allocate(64, 64, 64)
        self.states, self.records = arrays["peer_states"], arrays["ops"]
        self.live = [1, 2]
        self.known: Any = SimpleNamespace(
            cookie=7, world=RANKS, peers=[1, 2], self_late=False,
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

    def op(self) -> Op:
        """One more in flight, whose own rows have been sent."""
        made = launched(self._sequence, len(self.ops))
        made.sending = Sending.OVER
        self.ops.append(made)
        self.running.add(made)
        return made

    def record(self, op: Op) -> Any:
        """Of the kernel, made if there is none."""
        found = self.records[op_slot(op.label)]
        found["cookie"], found["op"] = self.known.cookie, op.label
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


class Written(dict[str, Any]):
    """A control record that remembers in which order its fields are written."""

    def __init__(self) -> None:
        super().__init__({name: np.zeros(1, np.uint32) for name in ("released", "result_base", "sum_base", "first_op")})
        self.order: list[str] = []

    def __setitem__(self, name: str, value: Any) -> None:
        self.order.append(name)
        super().__setitem__(name, np.full(1, value, np.uint32))


def window(control: Written) -> tuple[Window, Any]:
    """The window of rank 0 of two, and its job."""
    job: Any = SimpleNamespace(
        turn_keys=lambda step, turns: None,
        rank=0,
        sequence=SimpleNamespace(next_label=6, jump=lambda to: None, map=OwnerMap(0, (0, 1))),
        marks=SimpleNamespace(contributed=5, published=4, told=5),
        ranks=2,
        store=SimpleNamespace(control=control, result_rows=64),
    )
    queue: Any = SimpleNamespace(cancel=lambda label: 0)
    running: Any = SimpleNamespace(remove=lambda op: None)
    return Window(job, queue, lambda op: None, running), job


def test_the_published_mark_of_an_op_rises_before_it_is_let_go() -> None:
    """Its last results may leave together with answers, when all ops of the turn have been moved on.

    Without the mark others asked for it in vain, and waited for as long as they wait past deadlines.

    Rules: clock-7b, clock-19.
    """
    held, job = window(Written())
    place = SimpleNamespace(
        label=5, step=0, result_seq=8, sum_seqs=[4, 4], layout=SimpleNamespace(shape=SimpleNamespace(rows=4)),
        placement=SimpleNamespace(counts=np.array([2, 2]), shares=[2, 2], owner_map=SimpleNamespace(turns=0)),
    )  # fmt: skip
    held.pool = SimpleNamespace(keep=lambda place, buffers: None)  # type: ignore[assignment]
    through = SimpleNamespace(phase=Phase.DONE)
    held.ops[5] = SimpleNamespace(label=5, first=through, second=through, place=place, start=1, buffers=None)  # type: ignore[assignment]
    assert held.release()
    assert (held.ops, job.marks.published) == ({}, 5)


def test_what_is_over_is_said_before_its_place_is_given_to_others() -> None:
    """Else rows that are right would be refused: a row of an op in progress is not stored over (kernel-16)."""
    held, job = window(Written())
    held.jump(SimpleNamespace(step=3, result_seq=100, sum_seqs=[50, 60]))  # type: ignore[arg-type]
    assert job.store.control.order[:3] == ["released", "result_base", "sum_base"]
