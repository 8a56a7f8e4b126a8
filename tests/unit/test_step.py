"""Decisions about ops (``collective.step``, ``halves.c``), turns, and words about those that are over."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from op_world import OpWorld, asked, begin, launched
from tailbound.codec.owners import OwnerMap
from tailbound.collective.op import AGREEING, Op
from tailbound.collective.speaker import SELF_LATE_AFTER
from tailbound.collective.step import Do, step
from tailbound.collective.window import Window
from tailbound.kernel.core import core
from tailbound.transport.config import FLOOR
from tailbound.transport.sequence import Sequence
from tailbound.wire.packets import DTYPES
from tailbound.wire.ranks import bitmap, ranks_of
from tailbound.wire.schema import Found, Phase, Sending, Why

MS = 1_000_000
RANKS, ENTRIES = 3, 64 * 60
SCALES = np.zeros(1, np.int16)
Q, D1, R, STAGE_MAX, START_MAX = 1 * MS, 50 * MS, 100 * MS, 500 * MS, 400 * MS


class Step(NamedTuple):
    """Actions for an op, and when to look again."""

    actions: tuple[Any, ...] = ()
    look: int = 0


def seal(why: str) -> tuple[Found, Why]:
    return Found.SEAL, Why[why.upper()]


def finish(why: str) -> tuple[Found, Why]:
    return Found.FINISH, Why[why.upper()]


class Told(OpWorld):
    """What rank 0 of three is told of an op."""

    def __init__(
        self, op: Op, scales: bool = True, record: dict[str, Any] | None = None, contributed_by: Collection[int] = (),
        published_by: Collection[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(RANKS, stage_max=STAGE_MAX)
        self.op, self.scales, self.told = op, scales, record
        op.stage_one, op.usual = D1, R - D1 - FLOOR
        self.contributed_by, self.published_by = set(contributed_by), set(published_by)
        self.known.deadlines.quiet, self.known.deadlines.start_max, self.known.deadlines.advertised = Q, START_MAX, D1
        self.say()

    def say(self) -> None:
        """What a test has said is in memory."""
        self.marks("contributed", self.op.label, self.contributed_by)
        self.marks("published", self.op.label, self.published_by)
        super().record(self.op.label, self.told)
        self.known.scales = lambda _: SCALES if self.scales else None

    def take(self, now: int, *, may_send: bool = True) -> Step:
        """As ``Transpose`` moves an op, up to the first phase that ends."""
        actions: tuple[Any, ...] = ()
        self.say()
        found = self.move(self.op, now, asked=1)
        while found:
            if found == Found.SEND and may_send:
                what, self.op.due = step(self.op, self.known, now)
                if what not in (Do.WAIT, Do.TELL):
                    assert not self.op.due
                    return Step((what,))
                actions = (what,) if what == Do.TELL else ()
            elif found in (Found.SEAL, Found.FINISH):
                half = self.op.first if found == Found.SEAL else self.op.second
                return Step((*actions, (found, Why(half.why))))
            found = self.again(self.op, now)
        return Step(actions, self.op.due)

    def overtaken(self, now: int) -> bool:
        self.say()
        self.move(self.op, now)
        return bool(self.op.overtaken)

    def start_clock(self, op: Op, now: int) -> int:
        self.say()
        return super().start_clock(op, now)


@pytest.fixture
def op() -> Op:
    return launched(Sequence(RANKS, OwnerMap(0, (0, 1, 2))), RANKS)


def record(op: Op, **fields: Any) -> dict[str, Any]:
    """As the kernel keeps it."""
    return {"layout": op.place.tag, "results_in": 0, "rows_complete": 0, "opened_ns": 1} | fields


# -- the own rows -------------------------------------------------------------------------------------------------


def test_a_device_is_polled_before_own_rows_are_coded_and_before_codes_are_sent(op: Op) -> None:
    """First soon, then after an eighth of the time it has taken, at most a millisecond: nobody spins."""
    done, told = [False], Told(op)
    op.begun, op.ready = 2 * MS, lambda: done[0]
    looks = [told.take(2 * MS + passed).look - 2 * MS - passed for passed in (0, MS, 4 * MS, 80 * MS)]
    assert looks == [MS // 10, MS // 8, MS // 2, MS]
    done[0] = True
    assert told.take(90 * MS).actions == (Do.ENCODE,)
    op.sending, op.begun, done[0] = Sending.CODING, 90 * MS, False
    assert told.take(90 * MS) == ((), 90 * MS + MS // 10)
    done[0] = True
    assert told.take(91 * MS).actions == (Do.COLLECT,)


def test_what_is_told_again_keeps_no_half_from_ending(op: Op) -> None:
    op.sending, op.cold_since = Sending.AGREEING, 2 * MS
    told = Told(op, scales=False)
    told.known.self_misses = SELF_LATE_AFTER
    told.told = record(op, rows_complete=op.own)
    assert told.take(4 * MS).actions == (Do.TELL, seal("complete"))


@pytest.mark.parametrize(
    ("start", "sealed", "published_by", "now", "action"),
    [
        (MS, True, {1, 2}, MS + D1, Do.ENCODE),
        (MS, True, {1, 2}, MS + D1 + 1, Do.STAY_OUT),
        (1, True, {1, 2}, D1 + 2, Do.STAY_OUT),
        (0, True, {1, 2}, MS + D1 + 1, Do.ENCODE),  # no clock has started
        (MS, False, {1, 2}, MS + D1 + 1, Do.ENCODE),  # its own rows are open
        # an owner may wait for them, but no longer than a stage
        (MS, True, {1}, MS + D1 + 1, Do.ENCODE),
        (MS, True, {1}, MS + STAGE_MAX, Do.ENCODE),
        (MS, True, {1}, MS + STAGE_MAX + 1, Do.STAY_OUT),
    ],
)
def test_a_late_launch_sends_its_rows_as_long_as_an_owner_may_wait_for_them(
    op: Op, start: int, sealed: bool, published_by: set[int], now: int, action: Any
) -> None:
    """Rules: clock-17, clock-29."""
    op.start, op.first.phase = start, Phase.DONE if sealed else Phase.OPEN
    assert Told(op, published_by=published_by).take(now).actions[0] == action


def test_a_switch_still_answers_a_late_launch(op: Op) -> None:
    """Rule: clock-28."""
    op.start, op.first.phase, op.switched = MS, Phase.DONE, True
    for results, action in ((0, Do.ENCODE_LATE), (op.place.layout.shape.rows, Do.STAY_OUT)):
        told = Told(op, record=record(op, results_in=results))
        assert told.take(MS + D1 + 1).actions == (action,)


def test_a_cold_op_tells_its_scales_again_to_who_has_not_heard_and_settles_when_all_have_told(op: Op) -> None:
    """Rules: codec-5, clock-25."""
    assert Told(op, scales=False).take(2 * MS).actions == (Do.ENCODE,)  # with scales of its own no op is cold
    op.switched, op.first.phase, told = True, Phase.DONE, Told(op, scales=False)
    assert told.take(2 * MS).actions == (Do.MEASURE,)
    assert op.cold
    op.sending, op.cold_since = Sending.AGREEING, 2 * MS
    op.agreeing.ask(2 * MS)
    assert told.take(3 * MS) == Step((), 2 * MS + AGREEING.first)
    op.needs[1] = np.zeros(1, np.int16)
    assert told.take(4 * MS) == Step((Do.TELL,), 4 * MS + AGREEING.first)
    op.needs[2] = np.zeros(1, np.int16)
    assert told.take(5 * MS).actions == (Do.AGREE,)
    op.needs.clear()
    op.abstained[:] = bitmap([1, 2])
    assert told.take(5 * MS).actions == (Do.AGREE,)


def test_a_cold_op_waits_half_a_stage_for_scales_and_a_deadline_for_those_who_have_settled(op: Op) -> None:
    """Rule: clock-26."""
    told = Told(op, scales=False)
    op.sending, op.cold_since, op.agreeing.due = Sending.AGREEING, 2 * MS, 1 << 60
    assert told.take(3 * MS).look == MS + START_MAX + STAGE_MAX // 2
    op.start = 5 * MS
    assert told.take(6 * MS, may_send=True).look == 45 * MS  # of the first half
    op.first.phase = Phase.CLOSED
    assert told.take(6 * MS).look == 5 * MS + STAGE_MAX // 2
    op.start, op.first.phase = 0, Phase.OPEN
    core().fast.tb_stand_still(ctypes.addressof(op), 0)
    told.contributed_by = {1, 2}
    assert told.take(3 * MS).look == 2 * MS + D1
    assert told.take(2 * MS + D1).actions == (Do.STAY_OUT,)
    told.contributed_by = set()
    limit = MS + START_MAX + STAGE_MAX // 2
    assert not told.take(limit - 1).actions
    assert told.take(limit).actions == (Do.AGREE,)
    op.warm.add(1)  # it has said so itself
    assert told.take(3 * MS).actions == (Do.STAY_OUT,)


@pytest.mark.parametrize(
    ("sending", "second", "majority", "now", "look"),
    [
        # looked at only every 100 ms, of two ranks one paid that much more for the other in every op
        (Sending.LAUNCHED, Phase.OPEN, (0, 0), 2 * MS, MS + START_MAX),
        # packets come while a turn goes on, and rows wake nobody up
        (Sending.LAUNCHED, Phase.OPEN, (3 * MS, 0), 2 * MS, 3 * MS),
        (Sending.FORESEEN, Phase.OPEN, (3 * MS, 0), 2 * MS, 0),
        (Sending.FORESEEN, Phase.OPEN, (3 * MS, 4 * MS), 2 * MS, 4 * MS),
        (Sending.FORESEEN, Phase.CLOSED, (3 * MS, 4 * MS), 2 * MS, 0),
        (Sending.LAUNCHED, Phase.OPEN, (3 * MS, 0), 3 * MS, 0),
    ],
)
def test_a_clock_that_will_start_by_itself_is_looked_at_then(
    op: Op, sending: Sending, second: Phase, majority: tuple[int, int], now: int, look: int
) -> None:
    """Rule: clock-3."""
    op.sending, op.second.phase = sending, second
    assert Told(op, record=record(op, majority_ns=majority)).start_clock(op, now) == look
    assert op.start == (0 if look or sending == Sending.FORESEEN else majority[0])


# -- both halves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sending", "first", "second", "rows", "results", "ends"),
    [
        (Sending.OVER, Phase.OPEN, Phase.OPEN, 1, 1, [seal("complete")]),
        (Sending.OVER, Phase.CLOSED, Phase.OPEN, 1, 1, [finish("complete")]),
        (Sending.OVER, Phase.CLOSED, Phase.CLOSED, 1, 1, []),
        (Sending.OVER, Phase.OPEN, Phase.OPEN, 0, 1, []),  # not before its own rows are sealed
        (Sending.LAUNCHED, Phase.CLOSED, Phase.OPEN, 0, 1, []),  # nor sent
        (Sending.FORESEEN, Phase.CLOSED, Phase.OPEN, 0, 1, []),
    ],
)
def test_an_op_is_sealed_when_all_is_in_and_only_then_finished(
    op: Op, sending: Sending, first: Phase, second: Phase, rows: int, results: int, ends: list[Any]
) -> None:
    """It may not send yet. Rules: clock-7a, clock-12."""
    op.sending, op.first.phase, op.second.phase = sending, first, second
    here = record(op, rows_complete=rows * op.own, results_in=results * op.place.layout.shape.rows)
    assert Told(op, record=here).take(5 * MS, may_send=False).actions == tuple(ends)


def test_before_the_clock_starts_no_half_has_a_deadline(op: Op) -> None:
    op.sending, op.held = Sending.OVER, 1
    for op.first.phase in (Phase.OPEN, Phase.CLOSED):
        assert Told(op, record=record(op)).take(10_000 * MS) == ((), 0)
    assert op.first.deadline == op.second.deadline == 0


def test_the_second_half_has_twice_as_long_as_the_first_at_most(op: Op) -> None:
    """Rule: clock-11."""
    op.sending, op.start = Sending.OVER, 10 * MS
    told = Told(op, record=record(op))
    told.take(20 * MS)
    op.first.phase = Phase.CLOSED
    told.take(20 * MS)
    op.stage_one *= 2  # it has begun, and begins once
    told.take(20 * MS)
    assert (op.first.deadline, op.first.limit) == (10 * MS + D1, 10 * MS + STAGE_MAX)
    assert (op.second.deadline, op.second.limit) == (10 * MS + R, 10 * MS + 2 * STAGE_MAX)


@pytest.mark.parametrize("switched", [False, True])
def test_who_lives_is_waited_for_past_the_deadline_but_not_where_a_switch_sums(op: Op, switched: bool) -> None:
    """Rule: clock-29."""
    op.sending, op.start, op.switched = Sending.OVER, 10 * MS, switched
    told = Told(op, record=record(op))
    for rank in (1, 2):
        told.known.hear(rank, 58 * MS)
        asked(told.known.overtime, rank, 59 * MS, 58 * MS)
    told.take(50 * MS)
    assert told.take(60 * MS).actions == ((seal("deadline"),) if switched else ())


def test_an_op_that_is_not_launched_is_sealed_at_its_deadline_unless_it_was_foreseen_wrongly(op: Op) -> None:
    """Rule: clock-7c."""
    op.sending, op.start = Sending.FORESEEN, 10 * MS
    told = Told(op, record=record(op, layout=op.place.tag ^ 1, rows_complete=op.own))
    assert told.take(10 * MS + D1) == Step()
    op.sending = Sending.OVER  # whatever others name
    assert told.take(10 * MS + D1).actions == (seal("complete"),)
    op.sending = Sending.FORESEEN
    told.told = record(op)
    assert told.take(30 * MS) == Step((), 50 * MS)  # the last step before the deadline
    assert told.take(50 * MS) == Step((), 60 * MS)
    assert told.take(60 * MS).actions == (seal("deadline"),)


# -- clocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("sealed", [False, True])
def test_after_a_hold_deadlines_start_anew(op: Op, switched: bool, sealed: bool) -> None:
    """Rule: clock-16. A switch is asked to release rows at the first half's deadline, whatever is sealed here."""
    op.switched, op.start = switched, 10 * MS
    op.first.phase = Phase.DONE if sealed else Phase.OPEN
    for half in (op.first, op.second):
        begin(half, op.start, D1, STAGE_MAX)
    core().fast.tb_stand_still(ctypes.addressof(op), 700 * MS)
    assert op.start == (10 * MS if sealed else 0)
    assert (op.first.deadline == 0) == (switched or not sealed)
    assert (op.second.deadline == 0) == sealed
    Told(op, record=record(op, majority_ns=(3 * MS, 0))).start_clock(op, 701 * MS)
    assert op.start == 700 * MS


@pytest.mark.parametrize(
    ("sending", "contributed_by", "published_by", "gone", "overtaken"),
    [
        (Sending.LAUNCHED, {1, 2}, {1, 2}, (), True),
        (Sending.OVER, {1, 2}, {1, 2}, (), False),
        (Sending.FORESEEN, {1, 2}, {1, 2}, (), False),
        (Sending.LAUNCHED, {1, 2}, {1}, (), False),
        (Sending.LAUNCHED, {1}, {1, 2}, (), False),
        (Sending.LAUNCHED, {1, 2}, {1, 2}, (1, 2), False),
    ],
)
def test_a_launch_is_overtaken_by_owners_that_are_through(
    op: Op, sending: Sending, contributed_by: set[int], published_by: set[int], gone: tuple[int, ...], overtaken: bool
) -> None:
    """Rules: clock-13, clock-20."""
    op.sending, told = sending, Told(op, contributed_by=contributed_by, published_by=published_by)
    for rank in gone:
        told.known.membership.bye(rank, 0)
    assert told.overtaken(9 * MS) == overtaken
    if overtaken:
        assert told.take(9 * MS).actions == (Do.STAY_OUT,)


@pytest.mark.parametrize(
    ("start", "now", "started"),
    [(0, 9 * MS, 1), (0, 4 * STAGE_MAX + 9 * MS, 9 * MS), (5 * MS, 4 * STAGE_MAX + 9 * MS, 5 * MS)],
)
def test_the_clock_of_an_overtaken_launch_has_begun_long_ago(op: Op, start: int, now: int, started: int) -> None:
    """Long enough for everything to be over. Rule: clock-13."""
    told = Told(op, contributed_by={1, 2}, published_by={1, 2})
    op.start, told.known.deadlines.start_max = start, 1 << 60  # else the clock has started
    assert (told.overtaken(now), op.start) == (True, started)


# -- turns --------------------------------------------------------------------------------------------------------


class Rank(OpWorld):
    """Rank 0 of three with ops in flight, all rows of the kernel's tables in reach."""

    def __init__(self) -> None:
        super().__init__(RANKS)
        self._sequence = Sequence(RANKS, OwnerMap(0, (0, 1, 2)), 5)
        self.ops: list[Op] = []

    def op(self) -> Op:
        """One more in flight, whose own rows have been sent."""
        made = launched(self._sequence, RANKS, len(self.ops))
        made.sending = Sending.OVER
        self.ops.append(made)
        self.fast.tb_enter(self.terms.pointer, ctypes.addressof(made))
        return made

    def turn(self, now: int, *, everything: bool = False) -> list[Op]:
        """Ops whose flows are to be looked at after a turn in which there is nothing to do; then they are."""
        self.fast.tb_begin_turn(self.terms.pointer, everything, 0)
        assert not self.fast.tb_next_op(self.terms.pointer, now)
        due = [op for op in self.ops if op.listen <= now]
        assert not [op for op in due if self.listen(op, now)]
        return due


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_flows_are_looked_at_when_it_is_time_and_when_something_has_changed_their_op(rank: Rank) -> None:
    op, other = rank.op(), rank.op()
    assert rank.turn(2 * MS) == [op, other]
    assert rank.terms.due == op.admitted + rank.terms.start_max  # the clock starts
    assert rank.turn(2 * MS) == []
    assert rank.turn(op.listen) == [op, other]
    op.stirred = True
    assert rank.turn(2 * MS) == [op]
    assert not op.stirred
    assert rank.turn(2 * MS, everything=True) == [op, other]
    for mark in ("contributed", "published"):
        rank.store.peer_states[1][mark] = op.label
        assert rank.turn(2 * MS) == [op]
        op.stirred = False  # by the end of a flow, say


def test_all_flows_are_looked_at_when_who_is_waited_for_or_what_was_learned_changes(rank: Rank) -> None:
    known = rank.known
    assert not known.follow()
    known.membership.contribution.accuse(2, 0)
    assert known.follow()
    assert (ranks_of(rank.terms.live), ranks_of(rank.terms.owners), rank.terms.suspects) == ({1}, {1, 2}, 1)
    known.membership.bye(2, 0)
    assert known.follow()
    bitmaps = rank.terms.owners, rank.terms.gone, rank.terms.voters
    assert [ranks_of(words) for words in bitmaps] == [{1}, {2}, {0, 1}]
    known.self_misses = SELF_LATE_AFTER
    assert known.follow()
    known.deadlines.quiet += 1
    assert known.follow()
    assert (rank.terms.self_late, rank.terms.silence) == (1, known.deadlines.quiet)
    assert not known.follow()


def test_the_newest_op_is_that_of_a_live_rank_across_the_wrap(rank: Rank) -> None:
    known, states = rank.known, rank.store.peer_states
    states["newest"][:3] = 0xFFFFFFF0, 3, 7
    assert [known.newest(own) for own in (0xFFFFFFF8, 5, 9)] == [7, 7, 9]
    known.membership.contribution.accuse(2, 0)
    known.follow()
    assert [known.newest(own) for own in (0xFFFFFFF8, 5)] == [3, 5]
    states["cookie"][1] += 1  # of another job
    assert known.newest(0xFFFFFFF8) == 0xFFFFFFF8


def test_ops_enter_in_order_and_leave_in_any(rank: Rank) -> None:
    """Launched just before the next one is foreseen, an older op came behind it, and counted as published with it."""
    for _ in range(6):
        rank.op()
    for at in (3, 0, -1):
        gone = rank.ops.pop(at)
        rank.fast.tb_leave(rank.terms.pointer, ctypes.addressof(gone))
    new = rank.op()
    assert rank.turn(MS) == [*rank.ops[:-1], new]
    handed = launched(rank._sequence, RANKS, 8)
    rank.fast.tb_hand(rank.terms.pointer, ctypes.addressof(handed))
    foreseen = rank.op()
    assert (new.after, handed.after) == (ctypes.addressof(handed), ctypes.addressof(foreseen))


def test_what_is_over_is_said_before_its_place_is_given_to_others() -> None:
    """Else rows that are right would be refused: a row of an op in progress is not stored over. Rule: kernel-16."""
    order = list[str]()

    class Control:
        first_op = 0

        def __setattr__(self, name: str, value: Any) -> None:
            order.append(name)

    sequence = SimpleNamespace(next_label=6, jump=lambda to: None, map=OwnerMap(0, (0, 1)), sum_seqs=[50, 60])
    store = SimpleNamespace(control=np.zeros(1, DTYPES["tb_control"]), result_rows=64)
    job: Any = SimpleNamespace(
        rank=0, ranks=2, sequence=sequence, store=store, marks=SimpleNamespace(), turn_keys=lambda step, turns: None,
        terms=None,
    )  # fmt: skip
    window = Window(job, SimpleNamespace(), lambda op: None)  # type: ignore[arg-type]
    window._control = Control()
    window.jump(SimpleNamespace(step=3, result_seq=100))  # type: ignore[arg-type]
    assert order == ["released", "result_base", "sum_base"]
