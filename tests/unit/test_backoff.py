"""When everybody who asks, waits and gives up does so: the times themselves, of every one that there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tailbound.collective.hello import Hello
from tailbound.transport import flush
from tailbound.transport.agreement import Agreement, Kind, Message
from tailbound.transport.backoff import AnswerTime
from tailbound.transport.config import MS
from tailbound.transport.flush import Retry, View
from tailbound.transport.membership import Membership


def hello() -> Iterator[int]:
    """A peer that never answers before the first op."""
    asker = Hello([1], 0)
    while True:
        yield asker.due
        asker.poll(asker.due)


def proposal() -> Iterator[int]:
    """A map that a live peer does not acknowledge."""
    agreement = Agreement(0, 2, (0, 1), Membership(2, 0).quorum)
    agreement.propose((0,), 5, 0)
    for now in itertools.count(0, MS):
        if agreement.poll(now, 5, [1], {}):
            yield now


def told(rank: int) -> Callable[[], Iterator[int]]:
    """A peer whose headers go on naming an older map, where ``rank`` has settled the newest one."""

    def times() -> Iterator[int]:
        agreement = Agreement(rank, 3, (0, 1, 2), Membership(3, rank).quorum)
        first = Agreement(0, 3, (0, 1, 2), Membership(3, 0).quorum)
        first.propose((0, 1), 5, 0)
        for peer, message in first.poll(0, 5, [1, 2], {}):
            other = Agreement(peer, 3, (0, 1, 2), Membership(3, peer).quorum)
            other.receive(message, 0, [0], 0)
            first.receive(other.poll(0, 5, [0], {})[0][1], peer, [1, 2], 0)
        first.poll(0, 5, [1, 2], {})
        if rank:
            agreement.receive(Message(Kind.SETTLED, 0, tuple(first.agreed)), 0, [0], 0)
        else:
            agreement = first
        now = 0
        while True:
            if any(message.kind == Kind.SETTLED for _, message in agreement.poll(now, 5, [2], {2: 0})):
                yield now
            now += MS

    return times


def switch_row(*, due: bool) -> Callable[[], Iterator[int]]:
    """A row whose mean a switch does not send: asked for, or released after the deadline."""

    def times() -> Iterator[int]:
        retry = Retry(100, 0, 1, AnswerTime(flush.PATIENCE, flush.PATIENCE_MOST))
        for now in range(MS, 3_000 * MS, MS):
            if retry.poll(now, View(99, lambda: np.array([3]), sent=True, finished=True, short=False, due=due), MS):
                yield now

    return times


def switch_gone() -> Iterator[int]:
    """Rows of a switch that is not there, more than a window takes."""
    retry = Retry(5000, 0, 1, AnswerTime(flush.PATIENCE, flush.PATIENCE_MOST))
    for now in range(2 * MS, 3_000 * MS, MS):
        for again in retry.poll(
            now, View(0, lambda: np.arange(5000), sent=True, finished=False, short=False, due=True), MS
        ):
            assert again.flush
            yield now


TIMES = {
    "hello": (hello, [0, 20, 60, 140, 300, 620, 940, 1260]),
    "proposal": (proposal, [0, 2, 6, 14, 30, 62, 94, 126, 158, 190]),
    "told by the leader": (told(0), [0, 2, 6, 14, 30, 62, 126, 254, 504, 754]),
    "told by another": (told(1), [20, 22, 26, 34, 50, 82, 146, 274, 524, 774]),
    "row of a switch": (switch_row(due=False), [2, 7, 17, 37, 77]),
    "row to be released": (switch_row(due=True), [1, 6, 16, 36, 76, 156]),
    "no switch": (switch_gone, [2, 8, 18, 38, 78, 158, 318]),
}
#: Those that end by themselves.
ENDING = {name for name in TIMES if "row" in name} | {"no switch"}


@pytest.mark.parametrize("name", TIMES)
def test_times(name: str) -> None:
    """In ms; of those that give up, all. Rules: clock-22, clock-28."""
    asker, expected = TIMES[name]
    found = list(itertools.islice(asker(), len(expected) + (name in ENDING)))
    assert [now // MS for now in found] == expected
