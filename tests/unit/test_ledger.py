"""The books of rows by peer and stage: they always balance, and late is not lost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from support import balanced
from tailbound.observe.ledger import Ledger, Recent
from tailbound.wire.schema import VERDICTS, Stage, Verdict


def verdicts(**counts: int) -> np.ndarray:
    made = np.zeros(VERDICTS, np.uint64)
    for name, count in counts.items():
        made[Verdict[name]] = count
    return made


def test_a_gap_below_the_finished_mark_is_a_loss() -> None:
    ledger = Ledger(3)
    ledger.close(Stage.CONTRIBUTIONS, 1, 100, 97, finished=True)
    entry = ledger.entry(Stage.CONTRIBUTIONS, 1, verdicts())
    assert entry == {
        "ops": 1, "expected": 100, "taken": 97, "missing": 3, "late": 0, "lost": 3, "refused": 0, "absent": 0,
        "repaired": 0, "duplicated": 0,
    }  # fmt: skip
    assert balanced(entry)


def test_rows_that_came_after_the_seal_are_late_and_not_lost() -> None:
    ledger = Ledger(2)
    ledger.close(Stage.CONTRIBUTIONS, 1, 100, 40, finished=False)
    assert ledger.entry(Stage.CONTRIBUTIONS, 1, verdicts())["absent"] == 60
    entry = ledger.entry(Stage.CONTRIBUTIONS, 1, verdicts(LATE=50, STALE_OP=7, DUPLICATE=2))
    assert (entry["late"], entry["lost"], entry["absent"], entry["duplicated"]) == (57, 0, 3, 2)
    assert balanced(entry)


def test_refused_rows_come_out_of_the_gaps_first() -> None:
    ledger = Ledger(2)
    ledger.close(Stage.CONTRIBUTIONS, 1, 50, 40, finished=True)
    ledger.close(Stage.CONTRIBUTIONS, 1, 50, 45, finished=False)
    entry = ledger.entry(Stage.CONTRIBUTIONS, 1, verdicts(SCALE_MISMATCH=12, LATE=2))
    assert (entry["refused"], entry["lost"], entry["late"], entry["absent"]) == (12, 0, 2, 1)
    assert balanced(entry)


def test_results_are_booked_apart() -> None:
    ledger = Ledger(2)
    ledger.close(Stage.CONTRIBUTIONS, 1, 10, 10, finished=True)
    ledger.close(Stage.RESULTS, 1, 20, 18, finished=True)
    entry = ledger.entry(Stage.RESULTS, 1, verdicts(STALE_RESULT=9, DUPLICATE_RESULT=1, LATE=3), repaired=4)
    assert (entry["expected"], entry["lost"], entry["late"], entry["repaired"]) == (20, 2, 0, 4)


def test_rows_of_another_map_or_layout_are_refused_and_not_lost() -> None:
    """They may be of either stage: no row is booked twice."""
    ledger = Ledger(2)
    ledger.close(Stage.CONTRIBUTIONS, 1, 50, 30, finished=True)
    ledger.close(Stage.RESULTS, 1, 50, 40, finished=True)
    for name in ("WRONG_MAP", "LAYOUT_MISMATCH", "SLOT_OUT_OF_RANGE", "NOT_FOR_THIS_RANK"):
        first, second = (ledger.entry(stage, 1, verdicts(**{name: 25})) for stage in Stage)
        assert (first["refused"], first["lost"], second["refused"], second["lost"]) == (20, 0, 5, 5)
        assert ledger.lost(1, verdicts(**{name: 25})) == (100, 5)
    assert ledger.lost(1, verdicts(WRONG_MAP=25, SCALE_MISMATCH=10, FUTURE_RESULT=9)) == (100, 0)
    assert ledger.lost(1, verdicts(LATE=25)) == (100, 30)


def test_whatever_happens_the_books_balance() -> None:
    draw = random.Random(5)
    for _ in range(300):
        ledger = Ledger(2)
        for stage in Stage:
            for _ in range(draw.randrange(4)):
                expected = draw.randrange(50)
                ledger.close(stage, 1, expected, draw.randint(0, expected), finished=draw.random() < 0.5)
        seen = verdicts(**{v.name: draw.randrange(60) for v in Verdict})
        for stage in Stage:
            assert balanced(ledger.entry(stage, 1, seen))


@pytest.mark.parametrize("name", ["expected", "missing", "lost"])
def test_a_wrong_entry_is_seen(name: str) -> None:
    ledger = Ledger(2)
    ledger.close(Stage.RESULTS, 1, 20, 18, finished=True)
    entry = ledger.entry(Stage.RESULTS, 1, verdicts())
    entry[name] += 1
    assert not balanced(entry)


def test_a_window_forgets_the_oldest() -> None:
    window = Recent(4)
    assert window.percentiles(50, 99) == (0.0, 0.0)
    for value in (1000, 1, 2, 3, 4):
        window.add(value)
    assert window.percentiles(0, 50, 100) == (1.0, 2.5, 4.0)
