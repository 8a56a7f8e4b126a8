"""When halves of ops begin and end (clock-7, clock-11 to clock-13), and waits past their deadlines (clock-29)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection

import numpy as np
import pytest

from op_world import OpWorld, asked, begin, spoke
from tailbound.collective.op import Half
from tailbound.collective.terms import FIRST, LONGEST, MOST, SHARE, Overtime
from tailbound.collective.timing import cut
from tailbound.kernel.core import core
from tailbound.transport.config import FLOOR
from tailbound.wire.packets import record_of
from tailbound.wire.ranks import bitmap
from tailbound.wire.schema import OWN_OP, Found, Phase, Sending, Why, op_slot

MS, S = 1_000_000, 1_000_000_000
LABEL, LAYOUT = 1 << 10, 3
COMPLETE, QUIET, DEADLINE = Why.COMPLETE, Why.QUIET, Why.DEADLINE
_Op = record_of(OWN_OP)


class Stage(OpWorld):
    """The second half of an op of rank 0 of two; rank 1 owns all rows. It lasts 50 ms until ``due`` (0: not begun)."""

    def __init__(self, due: int = 0, saved: int = 0) -> None:
        super().__init__(2)
        self.first, self.half, self.op = Half(), Half(), _Op()
        self.first.phase, self.op.sending, self.op.label, self.op.slot = Phase.DONE, Sending.OVER, LABEL, op_slot(LABEL)
        self.op.halves, self.op.layout = (ctypes.addressof(self.first), ctypes.addressof(self.half)), LAYOUT
        self._shares = np.zeros(2, np.int64)
        self.op.shares, self.op.admitted = self._shares.ctypes.data, 1
        self.own_record = self.record(LABEL, {"layout": LAYOUT})
        self.known.overtime.saved, self.known.overtime.share = saved, 0
        self.see(0, 1)
        if due:
            begin(self.half, due - 50 * MS, 50 * MS, 500 * MS)

    def see(self, progress: int, left: int, *, finished: bool = False, repairing: bool = False, word: int = 0) -> None:
        """In rows what has come and is missing; whether rank 1 has finished, or is to answer; its open question, ns."""
        self._shares[1] = self.op.rows = progress + left
        self.own_record["results_in"] = progress
        self.marks("published", LABEL, [1] if finished else [])
        self.half.open = repairing
        self.half.flows = self.half.flows or repairing  # no test looks at them
        self.known.hear(1, word)
        self.known.overtime.open[1] = word

    def decide(self, now: int, q: int = MS, launched: int = 1, insist: int = 0) -> tuple[Why | None, int]:
        """Why it is over (None: it is not), and when to look again."""
        self.terms.silence, self.terms.insist, self.op.admitted = q, insist, launched
        self.op.asked, self.op.due = 2, 0
        over = self.again(self.op, now) == Found.FINISH
        return (Why(self.half.why), 0) if over else (None, self.op.due)


@pytest.mark.parametrize(
    ("fewer", "need", "alone", "launched", "start"),
    [
        (0, 0, True, 0, 0),
        (0, 0, True, 3, 3),  # alone, the own launch is the majority
        (5, 0, False, 0, 0),  # one short of a majority
        (5, 0, False, 9, 9),
        (12, 0, False, 9, 12),
        (5, 7, False, 0, 7),  # a majority of peers, without the own launch
        (5, 7, False, 6, 6),
        (5, 7, False, 30, 7),
        (0, 0, False, 3, 1003),  # at the latest
        (0, 2000, False, 3, 1003),
    ],
)
def test_what_starts_a_clock(fewer: int, need: int, alone: bool, launched: int, start: int) -> None:
    """Rule: clock-3."""
    stage = Stage()
    stage.own_record["majority_ns"], stage.store.control["need"] = (fewer, need), 1 if alone else 2
    stage.op.sending, stage.op.admitted = Sending.LAUNCHED if launched else Sending.FORESEEN, launched
    stage.known.deadlines.start_max = 1000
    assert (stage.start_clock(stage.op, 1 << 40), stage.op.start) == (0, start)


#: Looks at a half that began at 1000 and lasts 100, for 500 at most: when, how many rows are in and how many are
#: missing then, whether all have finished ("f") and rows are asked for again ("r"); why it is over, or the next look.
LOOKS: dict[str, list[tuple[int, int, int, str, Why | int]]] = {
    "complete ends at once": [(1005, 3, 0, "", COMPLETE)],
    "quiet begins anew with every packet, and counts only when all have finished": [
        (1010, 5, 1, "", 1090), (1020, 5, 1, "f", 1030), (1025, 5, 1, "", 1090), (1029, 6, 1, "f", 1039),
        (1038, 6, 1, "f", 1039), (1039, 6, 1, "f", QUIET),
    ],
    "repair keeps it from being quiet but not from its deadline": [
        (1060, 3, 1, "fr", 1090), (1090, 3, 1, "fr", 1100), (1100, 3, 1, "fr", DEADLINE),
    ],
    "one more tenth would not do": [(1090, 3, 10, "", 1100), (1100, 8, 5, "", 1110), (1110, 10, 3, "", DEADLINE)],
    "without progress it is over": [(1050, 7, 1, "", 1090), (1090, 7, 1, "", 1100), (1100, 7, 1, "", DEADLINE)],
    "the last tenth counts from the first look in it": [
        (1090, 0, 1, "", 1100), (1095, 5, 1, "", 1100), (1100, 5, 1, "", 1110),
    ],
    "what came before it is too early to count": [
        (1050, 1, 1, "", 1090), (1090, 5, 1, "", 1100), (1100, 5, 1, "", DEADLINE),
    ],
    "it moves on by a tenth while rows come": [
        (1090, 1, 1, "", 1100), (1100, 2, 1, "", 1110), (1110, 3, 1, "", 1120), (1120, 3, 1, "", DEADLINE),
    ],
    "it moves on to its limit and no further": [
        *((now, now, 1, "", now + 10) for now in range(1090, 1500, 10)), (1500, 1500, 1, "", DEADLINE),
    ],
}  # fmt: skip


@pytest.mark.parametrize("looks", LOOKS.values(), ids=LOOKS)
def test_when_a_half_is_over(looks: list[tuple[int, int, int, str, Why | int]]) -> None:
    """Rules: clock-7a, clock-7b, clock-7c, clock-11, clock-12, clock-23."""
    stage = Stage()
    assert stage.decide(10**12) == (None, 0), "it has not begun"
    begin(stage.half, 1000, 100, 500)
    for now, rows, left, flags, found in looks:
        stage.see(rows, left, finished="f" in flags, repairing="r" in flags)
        assert stage.decide(now, q=10) == ((found, 0) if isinstance(found, Why) else (None, found)), now


def test_waiting_on_is_weighed_by_whether_rows_came_at_all() -> None:
    """Rank 1 says nothing, so that only rows tell that it lives. Rule: clock-29."""
    for rows, ends in (((0, 3, 3), [None, None, DEADLINE]), ((3, 3), [None, DEADLINE])):
        stage, found = Stage(1100, saved=S), []
        begin(stage.half, 1000, 100, 500)
        for now, here in zip((1090, 1100, 1110), rows, strict=False):
            stage.see(here, 9)
            found.append(stage.decide(now)[0])
        assert found == ends
    unseen = Stage(saved=S)  # no rank looked in the last tenth
    begin(unseen.half, 1000, 100, 500)
    unseen.see(3, 6)
    assert unseen.decide(1100) == (None, 1110)


def test_what_is_cut_off_is_told_by_the_pace_of_the_slowest_flow() -> None:
    """Rule: clock-5."""
    assert cut(100, [(50, 100), (90, 100), (0, 100), (100, 100)]) == 200
    assert cut(100, [(80, 100)]) == 125
    assert cut(100, [(1, 100)]) == 200
    assert cut(100, [(0, 100)]) is cut(100, []) is None


@pytest.mark.parametrize("launched", [1, 130 * MS])
def test_rows_that_can_still_be_had_are_insisted_on_past_the_deadline(launched: int) -> None:
    """That takes nothing off the overtime budget. Rules: clock-13, clock-35."""
    stage = Stage(100 * MS)
    stage.see(3, 1, repairing=True)
    stage.decide(95 * MS)
    assert stage.decide(130 * MS, launched=launched, insist=10 * MS) == (None, 140 * MS)
    stage.see(4, 1, repairing=True)
    assert stage.decide(136 * MS, launched=launched, insist=10 * MS) == (None, 140 * MS)
    assert stage.decide(140 * MS, launched=launched, insist=10 * MS) == (DEADLINE, 0)
    overtime = Overtime(95 * MS)
    charge(overtime, stage.half, 140 * MS)
    assert overtime.waited == (30 * MS if launched == 1 else 0)
    stage.see(4, 1)
    assert stage.decide(136 * MS, launched=launched, insist=10 * MS) == (DEADLINE, 0), "no answer may come any more"
    stage.see(5, 0)
    assert stage.decide(136 * MS, launched=launched, insist=10 * MS) == (COMPLETE, 0)


def test_a_launch_after_the_deadline_looks_once_for_results_that_their_owner_has_published() -> None:
    """Its flows have not been looked at. Rules: clock-13, clock-35."""
    for published, why in ((True, None), (False, DEADLINE)):
        stage = Stage(100 * MS)
        stage.see(3, 1, finished=published)
        assert stage.decide(130 * MS, launched=130 * MS)[0] is why


def until(stage: Stage, *, words: bool, repairing: int = 0, launched: int = 1, first: int = 95 * MS) -> int:
    """When the deadline (due at 100 ms, for 50 ms) ends a stage of which no row comes; ``words``: its ranks answer."""
    now, word = first, int(stage.known.overtime.open[1])
    while True:
        stage.see(0, 1, word=now - MS if words else word, repairing=now < repairing)
        why, again = stage.decide(now, launched=launched)
        if why is not None:
            assert why is DEADLINE
            charge(stage.known.overtime, stage.half, now)
            return now
        now = again


def test_who_lives_is_waited_for_as_long_as_there_is_time_saved_up() -> None:
    """Rows before tails: but what was saved up is gone then, and the next op ends at its deadline (clock-29)."""
    assert until(Stage(100 * MS, FIRST), words=True) == pytest.approx(min(100 * MS + FIRST, 550 * MS), abs=6 * MS)
    stage = Stage(100 * MS, FIRST)
    charge(stage.known.overtime, begin(Half(), 1, 19 * MS, 500 * MS), 20 * MS + 2 * FIRST)  # more than was saved up
    assert until(stage, words=True) == 100 * MS


def test_rows_that_are_asked_for_are_waited_for_past_the_deadline() -> None:
    """Rules: clock-23, clock-29."""
    assert until(Stage(100 * MS, MOST), words=False, repairing=130 * MS) == pytest.approx(130 * MS, abs=6 * MS)
    # the rest is for ranks of which more is missing
    assert until(Stage(100 * MS, FIRST), words=False, repairing=130 * MS) == 100 * MS


def test_a_late_launch_waits_for_who_lives_from_its_own_time_on() -> None:
    """Rules: clock-13, clock-29."""
    stage = Stage(100 * MS, FIRST)
    stage.known.overtime.open[1] = 200 * MS
    assert until(stage, words=False, launched=200 * MS, first=200 * MS) == pytest.approx(225 * MS, abs=6 * MS)
    assert stage.known.overtime.waited <= 30 * MS


def heard(words: dict[int, int], questions: dict[int, int], through: Collection[int] = (), now: int = 90) -> int:
    """Since when ranks 1 and 2 leave a question open, apart from those that are through."""
    world = OpWorld(3)
    awaited = (ctypes.c_uint64 * 4)(*bitmap({1, 2} - {*through}))
    for rank, when in words.items():
        world.store.peer_states[rank]["last_ns"] = when
    for rank, when in questions.items():
        asked(world.known.overtime, rank, when, words.get(rank, 0))
    return int(core().fast.tb_silence(world.terms.pointer, awaited, now))


def test_who_was_not_asked_since_it_was_heard_of_is_not_silent() -> None:
    """Rule: clock-29."""
    assert heard({}, {}) == 0  # nobody was ever heard of
    assert (heard({}, {1: 80}), heard({2: 50}, {1: 80})) == (0, 90)
    assert heard({2: 50}, {1: 80, 2: 70}) == 70
    assert heard({2: 75}, {1: 80, 2: 70}) == 75  # a mark of it has risen since
    assert heard({1: 60, 2: 75}, {1: 80, 2: 70}) == 80
    assert heard({1: 60, 2: 75}, {1: 80, 2: 70}, through=[1]) == 75
    assert heard({1: 60, 2: 75}, {1: 80, 2: 70}, through=[1, 2]) == 0


def deadline(due: int, length: int = 40 * MS) -> Half:
    return begin(Half(), due - length, length, 2 * S)  # type: ignore[no-any-return]


def silence(overtime: Overtime, half: Half) -> int:
    return int(core().fast.tb_patience(ctypes.addressof(overtime), ctypes.addressof(half)))


def charge(overtime: Overtime, half: Half, now: int) -> None:
    core().fast.tb_charge(ctypes.addressof(overtime), ctypes.addressof(half), now)


def worth(overtime: Overtime, half: Half, now: int, heard: int) -> bool:
    return bool(core().fast.tb_worth(ctypes.addressof(overtime), ctypes.addressof(half), now, heard, 0))


def saved(overtime: Overtime, now: int) -> int:
    return int(core().fast.tb_saved(ctypes.addressof(overtime), now))


def test_a_share_of_the_time_is_saved_up_to_a_bound_and_a_lower_floor_saves_up_less() -> None:
    overtime = Overtime(S)
    assert saved(overtime, S) == FIRST
    assert saved(overtime, 2 * S) == FIRST + SHARE * S
    assert saved(overtime, 1000 * S) == MOST
    low = Overtime(S, FLOOR // 10)
    assert (saved(low, S), saved(low, 1000 * S), low.reserve) == (FIRST // 10, MOST // 10, Overtime(S).reserve // 10)
    assert silence(low, deadline(S, 0)) == FLOOR // 10


@pytest.mark.parametrize(
    ("charged", "waited"),
    [([(0, 50), (20, 80), (90, 85)], 80), ([(90, 50), (40, 60), (50, 60)], 20)],
    ids=["time in which several ops wait is paid for once", "only what is past a deadline costs anything"],
)
def test_waits_past_deadlines_are_charged(charged: list[tuple[int, int]], waited: int) -> None:
    """``charged``: deadlines and when their halves are over, ms after a second."""
    overtime = Overtime(S)
    charge(overtime, Half(), S + 10 * MS)  # has not begun
    for due, over in charged:
        charge(overtime, deadline(S + due * MS), S + over * MS)
    assert overtime.waited == waited * MS
    assert abs(saved(overtime, S + 85 * MS) - (FIRST - waited * MS + SHARE * 85 * MS)) <= 2


def test_a_silence_and_what_is_saved_up_end_with_their_last_nanosecond() -> None:
    assert worth(Overtime(S), deadline(S, 10 * FIRST), S, S)
    assert not worth(Overtime(S), deadline(S, 10 * FIRST + 10), S, S)
    overtime, clock = Overtime(S), deadline(S)
    assert worth(overtime, clock, S, S - 20 * MS)
    assert not worth(overtime, clock, S, S - 20 * MS - 1)
    assert not worth(Overtime(0), deadline(15 * MS), 15 * MS, 0)  # never heard of, on a machine that has just begun


#: Questions to a rank (when, and when it was heard last), words of it, and how long answers take after each.
ANSWERS: dict[str, list[tuple[str, int, tuple[int, ...], int]]] = {
    "from the first question of a silence to the first word": [
        ("asked", 2, (S, S - MS), 0),
        ("asked", 2, (S + 20 * MS, S - MS), 0),  # the same silence
        ("spoke", 2, (S + 80 * MS,), 80 * MS),
        ("spoke", 2, (S + 300 * MS,), 80 * MS),  # not asked for
        ("asked", 3, (2 * S, S), 80 * MS),
        ("asked", 3, (2 * S + 220 * MS, 2 * S + 210 * MS), 80 * MS),  # its marks have risen since some time
        ("asked", 3, (2 * S + 310 * MS, 2 * S + 220 * MS), 80 * MS),  # it spoke as it was asked, so not in return
        ("spoke", 3, (2 * S + 320 * MS,), 100 * MS),
    ],
    "a stop is no answer": [
        ("spoke", 2, (5 * MS,), 0),  # nobody asked it
        ("asked", 2, (S, 0), 0), ("spoke", 2, (S + LONGEST + 1,), 0),
        ("asked", 2, (2 * S, 0), 0), ("spoke", 2, (2 * S + LONGEST,), LONGEST),
    ],
}  # fmt: skip


@pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS)
def test_a_silence_may_be_as_long_as_answers_take(said: list[tuple[str, int, tuple[int, ...], int]]) -> None:
    overtime, clock = Overtime(S), deadline(S)
    for word, rank, times, answer in said:
        (asked if word == "asked" else spoke)(overtime, rank, *times)
        assert (overtime.answer, silence(overtime, clock)) == (answer, min(max(20 * MS, 2 * answer), LONGEST))
    assert [overtime.open[rank] for rank in (2, 3)] == [0, 0], "no question is open after a word"


#: Of an op how late the thread wakes up, and how long it has waited for a core in all before each turn, ms; how many
#: such ops, and the longest wait between two turns (400 at most).
WAITS: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int, int]]] = {
    "own waits are those between two turns, in the last 64 ops": [
        ((), (10, 40, 50), 1, 30), ((), (55,), 1, 30), ((), (55,), 63, 5), ((), (55,), 1, 0), ((), (10_000,), 1, 400),
    ],
    "late wake-ups tell of waits that the kernel does not count, and a stop is none": [
        ((40, 7), (), 1, 40), ((401,), (), 64, 0), ((400,), (50,), 1, 400),
    ],
}  # fmt: skip


@pytest.mark.parametrize("ops", WAITS.values(), ids=WAITS)
def test_waits_for_a_core_make_silences_longer(
    ops: list[tuple[tuple[int, ...], tuple[int, ...], int, int]],
) -> None:
    """A busy host makes many short ones in an op: all together are no silence of anybody. Rule: clock-29."""
    overtime, told = Overtime(S), os.memfd_create("schedstat")
    assert (overtime.lack, overtime.lacked) == (0, 0)
    for late, waited, times, lack in ops:
        for _ in range(times):
            for each in late:
                overtime.woke(each * MS)
            for so_far in waited:
                os.pwrite(told, b"1 %d 1 " % (so_far * MS), 0)
                core().fast.tb_waited(ctypes.addressof(overtime), told)
            overtime.ended()
        assert overtime.lack == lack * MS
        assert silence(overtime, deadline(S)) == min(max(20, 2 * lack) * MS, LONGEST)
    os.close(told)
    assert overtime.lacked == ops[-1][1][-1] * MS
