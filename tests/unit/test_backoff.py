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
        for now in itertools.count(0, MS):
            if any(message.kind == Kind.SETTLED for _, message in agreement.poll(now, 5, [2], {2: 0})):
                yield now

    return times


def switch(rows: int, missing: int, *, due: bool) -> Callable[[], Iterator[int]]:
    """Rows whose means a switch does not send: asked for, or released after the deadline."""

    def times() -> Iterator[int]:
        retry = Retry(rows, 0, 1, AnswerTime(flush.PATIENCE, flush.PATIENCE_MOST))
        view = View(
            rows - missing, lambda: np.arange(missing), sent=True, finished=missing < rows, short=False, due=due
        )
        for now in range(5 * MS, 3_000 * MS, MS):
            for again in retry.poll(now, view, MS):
                assert again.flush == due
                yield now

    return times


TIMES = {
    "hello": (hello, [0, 20, 60, 140, 300, 620, 940, 1260]),
    "proposal": (proposal, [0, 2, 6, 14, 30, 62, 94, 126, 158, 190]),
    "told by the leader": (told(0), [0, 2, 6, 14, 30, 62, 126, 254, 504, 754]),
    "told by another": (told(1), [20, 22, 26, 34, 50, 82, 146, 274, 524, 774]),
    "row of a switch": (switch(100, 1, due=False), [6, 11, 21, 41, 81]),
    "row to be released": (switch(100, 1, due=True), [5, 10, 20, 40, 80, 160]),
    "no switch": (switch(5000, 5000, due=True), [5, 11, 21, 41, 81, 161, 321]),
}
#: Those that end by themselves.
ENDING = {name for name in TIMES if "row" in name} | {"no switch"}


@pytest.mark.parametrize("name", TIMES)
def test_times(name: str) -> None:
    """In ms; of those that give up, all. Rules: clock-22, clock-28."""
    asker, expected = TIMES[name]
    found = list(itertools.islice(asker(), len(expected) + (name in ENDING)))
    assert [now // MS for now in found] == expected
