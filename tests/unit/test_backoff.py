"""Questions that are asked again, ever more rarely; for a switch the times themselves."""

from __future__ import annotations

import numpy as np
import pytest

from tailbound.transport.backoff import Backoff, Policy
from tailbound.transport.config import MS
from tailbound.transport.flush import Retry


def test_waits_double_up_to_the_longest() -> None:
    question, times = Backoff(Policy(2, 9)), list[int]()
    for _ in range(5):
        times.append(question.due)
        question.ask(question.due)
    assert times == [0, 2, 6, 14, 23]


NOWS = range(5 * MS, 3_000 * MS, MS)


@pytest.mark.parametrize(
    ("rows", "missing", "due", "times"),
    [
        (100, 1, False, [6, 11, 21, 41, 81]),
        (100, 1, True, [5, 10, 20, 40, 80, 160, 320]),
        (5000, 5000, True, [5, 11, 21, 41, 81, 161, 321]),
    ],
    ids=["a row is asked for", "it is released after the deadline", "no switch is there"],
)
def test_rows_that_a_switch_does_not_send(rows: int, missing: int, due: bool, times: list[int]) -> None:
    """Asked for at these times, in ms. Rule: clock-28."""
    retry = Retry(rows, 0, 1)
    state = {"sent": True, "finished": missing < rows, "short": False, "due": due}
    turns = [(now, retry.poll(now, MS, rows - missing, lambda: np.arange(missing), **state)) for now in NOWS]
    assert [now // MS for now, places in turns if len(places)] == times
    assert retry.flushing == due
