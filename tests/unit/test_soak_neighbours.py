"""The part of ``make soak`` about neighbours says what is wrong, and nothing where all is well."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from soak import neighbours
from tailbound_lab.simulate.neighbours import Shares

GOOD = Shares(ops=[10.0, 10.0], took=[50.0, 50.0], tcp=[0.4], expected=1000, delivered=1000)


@pytest.mark.parametrize(
    ("case", "bad", "words"),
    [
        (neighbours.incast, Shares([1.0], [], [], expected=1000, delivered=998), "0.200 % of the rows"),
        (neighbours.incast, Shares([0.0], [], []), "of the rows lost"),
        (neighbours.two_jobs, Shares([10.0, 5.0], [], []), "Jain's index is 0.9"),
        (neighbours.two_jobs, Shares([0.0, 0.0], [], []), "Jain's index is None"),
        (neighbours.beside_tcp, Shares([10.0], [], [0.2]), "0.20 of the link"),
    ],
)
def test_what_is_wrong_is_said(
    monkeypatch: pytest.MonkeyPatch, case: Callable[[random.Random, int], str], bad: Shares, words: str
) -> None:
    got = GOOD
    monkeypatch.setattr(neighbours, "share", lambda *_, **__: got)
    assert case(random.Random(1), 1) == ""
    got = bad
    assert words in case(random.Random(1), 1)


def test_a_job_that_keeps_too_little_of_its_own_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([Shares([10.0], [], []), Shares([3.9], [], [0.5])])
    monkeypatch.setattr(neighbours, "share", lambda *_, **__: next(given))
    assert "the job 0.39 of what it had" in neighbours.beside_tcp(random.Random(1), 1)
