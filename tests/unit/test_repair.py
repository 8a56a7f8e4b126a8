"""Repair (clock-23): loss detection within a flow, questions for its mark (clock-30) and requests."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from answer_world import bitmaps, bits_of
from op_world import COOKIE, OpWorld, places
from packed import parse
from queue_world import Line
from tailbound.collective.op import Half
from tailbound.collective.terms import Path
from tailbound.kernel.core import core
from tailbound.transport.config import FLOOR, MS
from tailbound.transport.sockets import UdpSocket
from tailbound.wire.packets import record_of
from tailbound.wire.ranks import bitmap
from tailbound.wire.schema import OWN_OP, Flag, Phase, Sending, op_slot

#: A time that does not come.
NEVER = 1 << 62

ROWS, RANKS, AT_ONCE = 100, 32, 8
#: Of the op whose rows arrive, and its first row; the ring.
OP, SEQ, RING = 7 << 10, 0xFFFFFF80, 4096
STEP, LOOK, PATIENCE = 3 * MS, MS, 10 * MS
WINDOW = FLOOR // 250
_Op = record_of(OWN_OP)


def pto_of(path: Path, rows: int = ROWS) -> int:
    return int(core().fast.tb_pto(ctypes.addressof(path), rows))


def answered(path: Path, took: int, first: int = 0) -> None:
    core().fast.tb_answered(ctypes.addressof(path), took, first)


class Receiver(OpWorld):
    """Rank 0, and flows of 100 rows, or ``of``, from some senders, as a test says.

    Args:
        first: place in the list that flows of contributions begin with.
        here: rows that have come, by sender, in the order of sending.
        ended: senders that have finished.
        results: they are results.
        of: rows of a flow.
        asks: whether marks are asked for.
        bounds: other fields of ``tb_half``.
    """

    def __init__(
        self, first: int = 0, here: dict[int, set[int]] | None = None, ended: Iterable[int] = (),
        results: bool = False, of: int = ROWS, asks: bool = False, floor: int = FLOOR, **bounds: int
    ) -> None:  # fmt: skip
        super().__init__(RANKS, RING, floor=floor)
        self.first, self.here, self.ended, self.results, self.of = first, here or {1: set()}, set(ended), results, of
        self.halves, self.path, op = (Half(), Half()), self.known.repairs.paths[results * RANKS + 1], _Op()
        self.half, self.op = self.halves[results], op
        self.halves[0].phase = Phase.DONE if results else Phase.OPEN
        op.halves = tuple(ctypes.addressof(half) for half in self.halves)
        op.sending = Sending.OVER if results or asks else Sending.LAUNCHED
        op.label, op.slot, op.sum_seq, op.result_seq, op.own = OP, op_slot(OP), SEQ, SEQ, of
        self._lists = np.concatenate([self.places(rank) for rank in range(RANKS)]).astype(np.int32)
        self._tables = [np.full(RANKS, n, np.int64) for n in (of, first)] + [np.arange(RANKS) * of]
        op.shares, op.places, op.starts = (table.ctypes.data for table in self._tables)
        op.row_at = self._lists.ctypes.data
        self.deadline = 0
        self._say([])
        self.listen(op, 0)  # no flow has begun
        for name, value in ({"patience": PATIENCE, "step": STEP, "look": LOOK} | bounds).items():
            setattr(self.half, name, value)
        for rank, rows in self.here.items():
            self.come(rows, rank)

    def come(self, rows: Iterable[int], rank: int = 1) -> None:
        """Rows by their place in the order of sending."""
        listed = (np.array(sorted(rows), np.int64) + self.first) % self.of
        if self.results:
            self.store.presence[SEQ + self.places(rank)[listed] & RING - 1] = OP, COOKIE
            return
        slots = SEQ + listed & RING - 1
        self.store.slots["op"][slots], self.store.slots["cookie"][slots] = OP, COOKIE
        self.store.slots["ranks"][slots, 0] |= np.uint64(1 << rank)

    def places(self, rank: int) -> np.ndarray:
        return np.arange(rank, rank + RANKS * self.of, RANKS)[::-1]

    @property
    def came(self) -> int:
        """Rows of rank 1."""
        if self.results:
            return int((self.store.presence["op"][SEQ + self.places(1) & RING - 1] == OP).sum())
        return int((self.store.slots["ranks"][:, 0] >> np.uint64(1) & np.uint64(1)).sum())

    def _say(self, awaited: Iterable[int]) -> None:
        self.terms.live = self.terms.owners = bitmap(awaited)
        self.marks("published" if self.results else "contributed", OP, self.ended)

    def poll(self, now: int) -> tuple[dict[int, list[int]], list[int]]:
        """Rows to be requested of each sender, and whom to ask for the mark."""
        self._say(self.here)
        self.half.deadline = self.deadline
        found = self.listen(self.op, now)
        flows = list(self.half.begun)
        requests = {f.rank: places(self.half, f) for f in flows if f.requests}
        asked = [flow.rank for flow in flows if flow.asked]
        assert found == bool(requests or asked)
        return requests, asked

    def turn(self, now: int) -> dict[int, list[int]]:
        requests, asked = self.poll(now)
        assert not asked
        return requests

    def run(self, now: int, until: int) -> list[tuple[int, list[int]]]:
        """Looks whenever one is due; times and rows of the requests."""
        requests = []
        while now <= until:
            requests += [(now, rows) for rows in self.turn(now).values()]
            assert self.half.due > now
            now = self.half.due
        return requests

    def over(self, rank: int) -> bool:
        """Whether nothing more is requested of ``rank``."""
        return any(flow.rank == rank and (flow.over or not flow.awaited) for flow in self.half.begun)


ALL, SOME = set(range(ROWS)), set(range(40))
#: Looks at a flow: (when, rows that have come since the one before, whether the mark has, what is requested).
LOOKS: dict[str, list[tuple[int, Collection[int], bool, list[int]]]] = {
    "a flow without gaps requests nothing": [
        (STEP, SOME, False, []), (9 * STEP, ALL, True, []), (10 * STEP, (), True, []),
    ],
    "a row is lost a window after a row behind it": [
        (STEP, SOME - {7, 9}, False, []), (STEP + WINDOW - 1, (), False, []), (STEP + WINDOW, (), False, [7, 9]),
    ],
    "what comes within the window is not requested": [(STEP, SOME - {7}, False, []), (STEP + WINDOW, [7], False, [])],
    "rows that nothing has passed wait for the mark": [
        (STEP, SOME, False, []), (6 * STEP, (), True, []), (6 * STEP + WINDOW, (), True, [*range(40, ROWS)]),
    ],
    "a lost retransmission is detected by the next one": [
        (STEP, SOME - {7, 9}, False, []), (STEP + WINDOW, (), False, [7, 9]),
        (2 * STEP + WINDOW, [9], False, []), (2 * STEP + 2 * WINDOW, (), False, [7]),
    ],
    # it leaves before everything else, so rows that are still queued come after it
    "a retransmission passes no row that has not left": [
        (STEP, SOME - {7}, False, []), (STEP + WINDOW, (), False, [7]),
        (STEP + 2 * WINDOW, [7], False, []), (3 * STEP, (), False, []), (3 * STEP + WINDOW, (), False, []),
    ],
}  # fmt: skip


@pytest.mark.parametrize("results", [False, True])
@pytest.mark.parametrize("looks", LOOKS.values(), ids=LOOKS)
def test_lost_rows_are_requested(looks: list[tuple[int, Collection[int], bool, list[int]]], results: bool) -> None:
    """An op waits for answers only once the flow has ended."""
    receiver = begun(Receiver(results=results))
    for now, rows, ended, wanted in looks:
        receiver.come(rows)
        receiver.ended = {1} if ended else set()
        assert receiver.poll(now)[0] == ({1: wanted} if wanted else {})
        assert receiver.half.open == (ended and receiver.came < ROWS)


def begun(receiver: Receiver, rows: Iterable[int] = ()) -> Receiver:
    """The first look at its flow, at 0; ``rows`` come after it."""
    assert receiver.turn(0) == {}
    assert receiver.half.due == STEP
    receiver.come(rows)
    return receiver


def test_a_launch_after_the_deadline_requests_at_once() -> None:
    """Rule: clock-13."""
    receiver = Receiver(late=True, here={1: ALL - {0}}, ended={1})
    assert receiver.turn(MS) == {1: [0]}


def test_probe_timeouts_are_equal_at_first_and_then_double_until_a_row_comes() -> None:
    receiver = Receiver(here={1: ALL - {3, 4}}, ended={1}, patience=24 * PATIENCE)
    pto = pto_of(receiver.path)
    assert receiver.turn(MS) == {}
    first, times = MS + WINDOW, [0, 1, 2, 3, 4, 6, 10, 18]
    assert receiver.run(first, first + 18 * pto) == [(first + n * pto, [3, 4]) for n in times]
    receiver.come([4])
    now = first + 18 * pto + LOOK
    assert receiver.run(now, now + 2 * pto) == [(now + WINDOW, [3])]  # the other answer passed it


def test_timeouts_begin_with_the_mark_and_learn_from_the_answer_that_completes_a_half() -> None:
    """Until the mark answers wait behind the flow. Contributions and results have timeouts of their own."""
    receiver = begun(Receiver(), ALL - {7})
    receiver.run(STEP, 2 * STEP)
    receiver.ended, paths = {1}, receiver.known.repairs.paths
    again = 4 * STEP + pto_of(paths[1])
    assert receiver.run(4 * STEP, again) == [(again, [7])]
    receiver = Receiver(here={1: ALL - {7}}, ended={1})
    assert receiver.run(MS, 2 * MS) == [(MS + WINDOW, [7])]
    receiver.come([7])
    core().fast.tb_learn_last(ctypes.addressof(receiver.half), 4 * MS)
    assert [receiver.known.repairs.paths[half * RANKS + 1].usual for half in (0, 1)] == [3 * MS - WINDOW, 0]


def test_without_progress_a_flow_that_has_ended_is_given_up() -> None:
    """Its answers are slower than the probe timeouts, op after op: the next ones are longer."""
    receiver = Receiver(here={1: ALL - {3}}, ended={1})
    before = pto_of(receiver.path)
    receiver.run(MS, 100 * MS)
    assert (receiver.half.open, receiver.over(1), receiver.half.due) == (False, True, NEVER)
    assert pto_of(receiver.path) == 2 * before


def test_a_rank_without_the_missing_rows_is_over() -> None:
    receiver = Receiver(here={1: set(range(50)), 2: set(range(50))}, ended={1, 2})
    receiver.turn(MS)
    receiver.half.gone(2, 50, b"\xff" * 6 + b"\xc0")
    assert list(receiver.turn(MS + WINDOW)) == [1]
    assert receiver.over(2)
    assert receiver.half.open


def test_the_probe_timeout_follows_answers() -> None:
    path = Path(FLOOR)
    assert pto_of(path) == FLOOR // 5
    for took, count, least, most in (
        (5 * MS, 50, 5 * MS, 6 * MS), (40 * MS, 1, 25 * MS, 5 * FLOOR), (1000, 200, FLOOR // 20, FLOOR // 20),
        (400 * MS, 50, 5 * FLOOR, 5 * FLOOR),
    ):  # fmt: skip
        for _ in range(count):
            answered(path, took)
        assert least <= pto_of(path) <= most
    answered(quick := Path(FLOOR), 1000)
    bounds = [pto_of(quick, rows) for rows in (0, 50, 100, 200, 8192)]
    assert bounds == [FLOOR // part for part in (40, 40, 20, 10, 10)], "longer flows have later answers"


@pytest.mark.parametrize("known", [0, 20])
def test_a_lost_request_is_no_slow_answer(known: int) -> None:
    """The time from a lost request was taken for the usual one, and the next timeout was longer than the deadline."""
    path = Path(FLOOR)
    for first in [MS] * known + [7 * MS]:
        answered(path, MS, first)
    assert pto_of(path) <= 6 * MS


def test_answers_to_earlier_requests_alone_lengthen_the_timeout() -> None:
    """By each answer after several requests it grew, up to its bound: few requests were left within ``insist``."""
    path = Path(FLOOR)
    for _ in range(100):
        answered(path, MS, 3 * MS)
    assert pto_of(path) <= 2 * MS
    for _ in range(100):
        answered(path, MS // 4, 40 * MS)
    assert pto_of(path) >= 30 * MS


def test_the_reordering_window_widens_where_rows_come_twice() -> None:
    path, ever = Path(FLOOR), 0
    for twice, probed, times, window in (
        (5, False, 1, WINDOW),  # half of them is as many as may
        (6, True, 1, WINDOW),  # the timeout was too short, not the window
        (6, False, 20, FLOOR),
        (0, False, 100, WINDOW),
    ):
        for _ in range(times):
            ever += twice
            path.settled(10, ever, probed=probed)
        assert path.window == window


def questions(until: int, rows: dict[int, int], *, of: int = ROWS, deadline: int = 0, answers: int = 0,
              floor: int = FLOOR, results: bool = False) -> list[tuple[float, list[int]]]:  # fmt: skip
    """Who is asked for its mark and when, ms after the last row, while no more comes than ``rows`` of each sender.

    ``answers``: what they have taken so far, ns.
    """
    here, found, now = {rank: set(range(count)) for rank, count in rows.items()}, [], 0
    receiver = Receiver(here=here, of=of, asks=True, floor=floor, step=floor // 10, results=results)
    receiver.deadline, receiver.op.switched = deadline, not of
    receiver.terms.gone = bitmap(() if of else range(2, RANKS))
    for _ in range(50 if answers else 0):
        answered(receiver.path, answers)
    while now <= until:
        requests, asked = receiver.poll(now)
        assert not requests
        if asked:
            found.append(((now - floor // 10 * any(rows.values())) / MS, asked))
        assert receiver.half.due > now
        now = receiver.half.due
    return found


BEGUN, NOT_BEGUN = [2, 4, 6, 8, 12, 20, 36, 68, 132, 260, 388], [20, 60, 140, 300]


@pytest.mark.parametrize(
    ("rows", "more", "times"),
    [
        ({1: 40}, {}, BEGUN),
        ({1: 0}, {}, NOT_BEGUN),
        ({1: 0}, {"of": 3}, [2, 42, 122, 282]),  # the flow may be lost as a whole
        ({1: 0}, {"of": 4}, NOT_BEGUN),
        ({1: 0}, {"of": 16, "results": True}, BEGUN),
        ({1: 0}, {"of": 17, "results": True}, NOT_BEGUN),
        ({1: 0}, {"of": 0, "results": True}, [2, 42, 122, 282]),  # whose rows go to a switch
        ({1: 40}, {"answers": 9 * MS}, [9, 18, 27, 36, 54, 90, 162]),
        ({1: 40}, {"floor": FLOOR // 50}, [t / 50 for t in BEGUN]),
        ({1: 0}, {"deadline": 16 * MS}, [10, 30, 50, 70]),  # in time for an answer, and then for a later deadline
        ({1: 0}, {"deadline": 60 * MS}, [20, 54, 74]),
        ({1: 0}, {"deadline": 5 * MS}, [2, 22, 42, 62]),  # never at once
    ],
)
def test_who_leaves_a_mark_open_is_asked_ever_more_rarely_and_before_the_deadline(
    rows: dict[int, int], more: dict[str, Any], times: list[float]
) -> None:
    """Rules: clock-30, clock-36."""
    assert questions(int((times[-1] + 2) * MS), rows, **more)[: len(times)] == [
        (pytest.approx(time, rel=0.01), [1]) for time in times
    ]


def test_of_many_that_are_missing_few_are_asked_at_a_time_and_all_in_turn() -> None:
    """But before a deadline all. Rule: clock-30."""
    many = dict.fromkeys(range(1, 3 * AT_ONCE - 1), 40)
    found = questions(30 * MS, many)
    assert max(len(asked) for _, asked in found) == AT_ONCE
    assert {rank for _, asked in found[:3] for rank in asked} == set(many)
    late = [asked for now, asked in questions(25 * MS, many, deadline=30 * MS) if now >= 20]
    assert {rank for asked in late for rank in asked} == set(many)


def test_rows_of_a_sender_that_is_awaited_again_are_requested() -> None:
    """It was suspected for a while by what another op had not got. Rules: clock-14, clock-23."""
    receiver = begun(Receiver(), ALL - {7})
    here, receiver.here = receiver.here, {}
    assert (receiver.poll(STEP), receiver.over(1), receiver.half.open) == (({}, []), True, False)
    receiver.here = here
    receiver.ended = {1}
    assert receiver.run(2 * STEP, 3 * STEP + 2 * WINDOW)[0][1] == [7]
    assert (receiver.half.open, receiver.half.closed) == (True, 0)


def test_rows_that_are_gone_end_no_more_than_themselves() -> None:
    """A flow whose owner lacks one row was given up as a whole. This one begins in the middle of the list.

    Rule: clock-23.
    """
    receiver = begun(Receiver(first=90), SOME - {7, 12})
    assert (receiver.turn(STEP), receiver.turn(STEP + WINDOW)) == ({}, {1: [2, 97]})
    assert [flow.again for flow in receiver.half.begun] == [2]
    receiver.half.gone(1, 97, b"\x80")
    receiver.come(ALL - SOME - {70})
    receiver.ended = {1}
    now = STEP + WINDOW + LOOK
    receiver.turn(now)
    assert receiver.turn(now + WINDOW)[1][0] == 60
    receiver.come([12, 70])
    receiver.turn(now + 2 * WINDOW + LOOK)
    assert (receiver.over(1), receiver.half.open) == (True, False)


@pytest.mark.parametrize("insist", [0, 30 * MS])
def test_patience_follows_what_results_take(insist: int) -> None:
    """Lost results are insisted on: one costs every replica. Rules: clock-23, clock-35."""
    for d2, most in ((0, FLOOR), (40 * MS, FLOOR), (100 * MS, 25 * MS), (10_000 * MS, 50 * MS)):
        for results in (False, True):
            receiver = Receiver(results=results)
            receiver.terms.insist, receiver.op.usual = insist, d2
            core().fast.tb_leave(receiver.terms.pointer, ctypes.addressof(receiver.op))  # its flows begin anew
            receiver.listen(receiver.op, 0)
            half = receiver.half
            assert half.patience == max(most, insist * results)
            look = min(MS, max(FLOOR, d2) // 40)
            assert (half.step, half.look) == (d2 // 10 if d2 > FLOOR else look, look)


def test_rows_are_asked_for_and_marks_without_python(bound: UdpSocket) -> None:
    """A question for a mark in copies. Rules: clock-23, clock-30."""
    receiver, line = begun(Receiver(asks=True), SOME - {7, 12}), Line([bound])
    voice, receiver.op.layout, receiver.op.listen = receiver.speaks(line.queue.line, ROWS // 8), 9, 0
    receiver.fast.tb_enter(receiver.terms.pointer, ctypes.addressof(receiver.op))
    words = "owner", "op", "layout", "contributed", "published", "flags", "rows", "row"
    asked = [(1, OP, 9, 5, 6, Flag.FIRST_HALF, ROWS, 7), *[(1, OP, 9, 5, 6, 0, 0, 0)] * 8]
    for count in (0, 1, 1, 9):
        receiver.come({7, 12} if voice.repair_asked else {})
        now = receiver.half.due
        receiver.fast.tb_ask_others(ctypes.addressof(voice), now)
        line.queue.pump(now)
        said = [parse(data)[0] for _, data in line.kernel.single]
        assert [tuple(int(head[word][0]) for word in words) for head in said] == asked[:count]
    assert (voice.repair_asked, voice.asked, receiver.known.overtime.open[1]) == (1, 1, now)


# -- bodies -------------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 65534), min_size=1, max_size=400), st.sampled_from([16, 256, 1408]))
def test_what_is_asked_comes_out(places: set[int], width: int) -> None:
    wanted = np.array(sorted(places), np.int64)
    found = []
    for row, body in bitmaps(wanted, width):
        assert 0 < len(body) <= width
        found += (row + bits_of(body)).tolist()
    assert found == wanted.tolist()


def test_few_packets_for_many_rows() -> None:
    assert len(bitmaps(np.arange(20_000), 1408)) == 2
    assert bitmaps(np.array([9, 11]), 1408) == [(9, bytes([0b10100000]))]
    assert bitmaps(np.array([0, 7, 8 * 16]), 16) == [(0, bytes([0b10000001])), (128, bytes([0b10000000]))]


@settings(max_examples=300)
@given(st.binary(max_size=20), st.integers(0, ROWS) | st.integers(0, 65535), st.integers(0, ROWS - 1))
@example(b"\x80", ROWS - 1, 0)
@example(b"\x80", ROWS, 0)
def test_any_body_is_refused_or_within_the_list(body: bytes, row: int, first: int) -> None:
    receiver = Receiver(first=first, ended={1})
    receiver.turn(MS)
    receiver.half.gone(1, row, body)
    gone = {row + i for i in range(8 * len(body)) if body[i >> 3] << (i & 7) & 128}
    lost = {*range(ROWS)} - (gone if max(gone, default=0) < ROWS else set())
    assert {*receiver.turn(MS + WINDOW).get(1, [])} == lost
