"""What a rank asks a switch for, by sending its own rows again, and exactly when (clock-28)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from op_world import COOKIE, OpWorld, places
from tailbound.collective.op import Half
from tailbound.transport.config import FLOOR, MS, Switch
from tailbound.wire.packets import record_of
from tailbound.wire.schema import OWN_OP, Phase, Sending, op_slot

RANKS, OP, SEQ, RING = 4, 7 << 10, 0xFFFFFF80, 4096
#: Between two looks, and what a row may come later than rows behind it; the probe timeout before any answer.
STEP, WINDOW, PTO = FLOOR // 10, MS, FLOOR // 5
OTHERS = range(1, RANKS)
#: Rows of an op by whose share they are.
SHARES = [[*range(rank, 100, RANKS)] for rank in range(RANKS)]


class Asker(OpWorld):
    """Rank 0, which has coded ``rows`` rows for the switch."""

    def __init__(self, rows: int = 100) -> None:
        super().__init__(RANKS, RING, switch=Switch("10.0.0.9", rows=RING))
        self.rows, self.now, self.through, self.half = rows, 1000 * MS, list[int](), Half()
        self.op: Any = record_of(OWN_OP)()
        self.halves, op = (Half(), self.half), self.op
        self.halves[0].phase, op.sending, op.own_in, op.switched = Phase.DONE, Sending.OVER, 1, True
        op.halves = tuple(ctypes.addressof(half) for half in self.halves)
        op.label, op.slot, op.result_seq, op.rows = OP, op_slot(OP), SEQ, rows
        self._tables = np.zeros(RANKS + 1, np.int64), np.zeros(RANKS + 1, np.int64), np.arange(rows, dtype=np.int32)
        self._tables[0][RANKS] = rows
        op.shares, op.starts, op.row_at = (table.ctypes.data for table in self._tables)
        op.places = self._tables[1].ctypes.data

    @property
    def pto(self) -> int:
        """The probe timeout, by what answers have taken."""
        path = self.known.repairs.paths[self.known.world + RANKS]
        return int(self.fast.tb_pto(ctypes.addressof(path), self.rows))

    def come(self, rows: Iterable[int]) -> None:
        self.store.presence[SEQ + np.array([*rows], np.int64) & RING - 1] = OP, COOKIE

    def end(self, ranks: Iterable[int] = OTHERS) -> None:
        """The own rows have left, and these ranks say the same of theirs."""
        self.op.left, self.through = True, [*ranks]

    def look(self, after: int = 0) -> list[int]:
        """Places that are asked for; questions for marks are another matter (clock-30)."""
        self.now += after
        self.known.follow()
        self.marks("contributed", OP, self.through)
        self.listen(self.op, self.now)
        asked = [places(self.half, flow) for flow in self.half.begun if flow.rank == RANKS and flow.requests]
        return asked[0] if asked else []

    def until(self, end: int) -> list[tuple[int, list[int]]]:
        """Looks whenever one is due; when something is asked for, and what."""
        asked = []
        while self.half.due <= end:
            places = self.look(max(0, self.half.due - self.now))
            asked += [(self.now, places)] if places else []
            assert self.half.due > self.now
        self.now = end
        return asked


def test_a_row_is_sent_again_once_rows_behind_it_have_come_for_a_while() -> None:
    asker = Asker()
    assert asker.look() == []
    asker.come({*range(60)} - {7, 9})
    assert (asker.look(STEP), asker.look(WINDOW - 1)) == ([], [])
    assert (asker.look(1), asker.look(WINDOW)) == ([7, 9], [])
    asker.come([9])
    assert asker.look(STEP) == []
    assert asker.look(WINDOW) == [7], "it was asked for before one that has come"


@pytest.mark.parametrize("waits_for", ["own rows", "another rank"])
def test_a_tail_is_asked_for_after_a_probe_timeout_of_silence_when_all_have_sent(waits_for: str) -> None:
    asker = Asker()
    asker.look()
    asker.come(range(95))
    asker.end(OTHERS[1:] if waits_for == "another rank" else OTHERS)
    asker.op.left = waits_for != "own rows"
    assert asker.until(asker.now + 20 * PTO) == []
    asker.end()
    assert asker.look() == []
    asker.come([95])
    assert asker.look(PTO - 1) == []
    assert asker.look(PTO - 1) == [], "a row has come since"
    assert asker.look(1) == [*range(96, 100)]
    assert not asker.half.release


def test_questions_become_rarer_and_never_end() -> None:
    asker = Asker()
    asker.look()
    asker.come(range(99))
    asker.end()
    asker.look()
    begun = asker.now
    assert [(when - begun) // PTO for when, _ in asker.until(begun + 200 * PTO)] == [1, 3, 7, 15, 31, 63, 127, 191]


def test_ranks_release_their_shares_after_the_deadline_and_all_rows_after_a_silence() -> None:
    asker = Asker()
    asker.look()
    asker.half.release = True
    assert asker.look() == SHARES[0]
    asker.come(SHARES[0][:-1] + SHARES[1])
    assert asker.look(3 * MS // 2) == []
    assert asker.pto == 3 * MS
    assert asker.look(asker.pto - 1) == [], "others may be asking yet"
    assert asker.look(1) == sorted([SHARES[0][-1], *SHARES[2], *SHARES[3]])


def test_shares_are_those_of_live_ranks() -> None:
    asker = Asker()
    asker.known.membership.bye(2, OP)
    asker.look()
    asker.half.release = True
    assert asker.look() == [*range(0, 100, RANKS - 1)]


@pytest.mark.parametrize("named", ["abstained", "stayed"])
def test_rows_are_released_early_in_a_silence_where_a_rank_brings_none(named: str) -> None:
    asker = Asker()
    getattr(asker.op, named)[0] = 1 << 3
    asker.look()
    asker.end()
    assert asker.look() == []
    asker.op.stirred = False
    assert asker.look(PTO) == SHARES[0]
    assert asker.half.release == asker.op.stirred == 1, "the first half's deadline ends nothing any more"
    assert asker.look(PTO) == [*range(100)]


def test_no_more_than_a_burst_of_rows_is_under_way() -> None:
    asker = Asker(3000)
    asker.look()
    asker.half.release = True
    shares = [*range(0, 3000, RANKS)]
    assert (asker.look(), asker.look(MS)) == (shares[:256], [])
    asker.come(shares[:100])
    assert asker.look(MS) == shares[256:356]
    silence = asker.look(asker.pto)
    assert silence == [row for row in range(3000) if row not in shares[:100]][:256]


def test_without_rows_of_its_own_a_rank_has_nothing_to_ask_with() -> None:
    asker = Asker()
    asker.op.own_in = 0
    asker.look()
    asker.half.release = True
    asker.end()
    assert asker.until(asker.now + 20 * PTO) == []
