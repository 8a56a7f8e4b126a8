"""Warnings of buckets: how an op is called, and how often a line comes."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("torch")
from tailbound.collective.op import Outcome
from tailbound.observe.events import LINES, PERIOD
from tailbound.torch.complaints import Complaints


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def test_a_silent_rank_is_named_once_and_the_op_as_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(0, Clock())
    for _ in range(3):
        complaints.note(Outcome(label=26 << 10, missing={2}))
    assert [r.getMessage() for r in caplog.records] == ["rank 0: nothing from rank(s) [2] in op 26.0"]


@pytest.mark.parametrize(("void", "cause"), [(True, "each had NaN or Inf values"), (False, "came in time")])
def test_a_gradient_of_zeros_has_its_cause(void: bool, cause: str, caplog: pytest.LogCaptureFixture) -> None:
    Complaints(0, Clock()).note(Outcome(failed_groups=1, void=void))
    (line,) = [r.getMessage() for r in caplog.records]
    assert cause in line


def test_a_rank_that_comes_and_goes_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Every sentence at most five times in ten seconds, and how many were left out is said."""
    clock = Clock()
    complaints = Complaints(0, clock)

    def misses(ops: int) -> None:
        for label in range(ops):
            complaints.note(Outcome(label=label, missing={1} if label % 2 else set(), late=True, overwritten=1))

    misses(1088)
    lines = [r.getMessage() for r in caplog.records]
    assert sum("nothing from" in line for line in lines) == LINES
    for kind in ("too late", "overwritten"):
        assert 0 < sum(kind in line for line in lines) <= LINES
    clock.now += PERIOD
    caplog.clear()
    misses(2)
    assert caplog.records[0].getMessage().endswith(f"({544 - LINES} more like it were not logged)")


def test_other_sentences_are_thinned_too(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(3, Clock())
    with caplog.at_level(logging.INFO, "tailbound"):
        for step in range(100):
            complaints.say("overflow", f"gradients overflow: now {step}", logging.INFO)
    assert len(caplog.records) == LINES
