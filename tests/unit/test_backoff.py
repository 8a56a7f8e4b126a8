"""Questions that are asked again, ever more rarely."""

from __future__ import annotations

from tailbound.transport.backoff import Backoff, Policy


def test_waits_double_up_to_the_longest() -> None:
    question, times = Backoff(Policy(2, 9)), list[int]()
    for _ in range(5):
        times.append(question.due)
        question.ask(question.due)
    assert times == [0, 2, 6, 14, 23]
