"""How the transport thread sleeps: long where there is nothing to do, and without missing that it stood still."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailbound.collective.transpose import Transpose
from tailbound.transport.config import MS

#: Where the clock begins.
NOW = 10_000 * MS


class Sleeper:
    """A transport thread on a clock that only its waits move; ``held_up`` is added to the wait of that number."""

    def __init__(self, *, ops: bool = False, held_up: dict[int, int] | None = None) -> None:
        self.now, self.waits = NOW, list[int]()
        self._held_up = held_up or {}
        self.thread: Any = Transpose.__new__(Transpose)
        self.thread.job = SimpleNamespace(
            now=lambda: self.now,
            flow=SimpleNamespace(queue=SimpleNamespace(full=set(), again=0)),
            sender=SimpleNamespace(deferred=()),
            overtime=SimpleNamespace(woke=lambda late, held_up: None, held_up=0),
        )
        self.wanted = set[int]()  # sockets in which there is to be room
        self.thread._waiter = SimpleNamespace(
            want_room=self.wanted.update, wait=self._wait, readable=lambda _: False, woken=NOW
        )
        self.thread._ops = {1: SimpleNamespace(encoded=False, finished=False)} if ops else {}
        self.thread._holding = SimpleNamespace(again=0)
        self.thread._silence, self.thread._wake, self.thread._awake = 0, -1, NOW

    def _wait(self, nanoseconds: int) -> int:
        self.now += max(0, nanoseconds) + self._held_up.get(len(self.waits), 0)
        self.waits.append(nanoseconds)
        return 0

    def slept(self, again: int = 0) -> int:
        """Sleeps; returns for how long, in ns."""
        self.thread._sleep(again)
        return self.now - NOW

    @property
    def unwatched(self) -> int:
        """What the next turn finds: since when nobody has run."""
        return int(self.now - self.thread._awake)


@pytest.mark.parametrize(
    ("ops", "again", "held_up", "slept", "unwatched"),
    [
        (False, 0, 0, 1000, range(101)),  # without ops it sleeps long, but breathes
        (True, 0, 0, 100, range(101)),  # with one it looks around more often
        (False, NOW + 3 * MS, 0, 3, range(4)),  # something is due
        (False, NOW - 3 * MS, 0, 0, range(1)),
        (False, 0, 400, 700, range(351, 501)),  # a process that stood still in its sleep is noticed at once
        (False, 0, 200, 1000, range(350)),  # one that waited for a core has not been stopped
    ],
)
def test_how_long_it_sleeps(ops: bool, again: int, held_up: int, slept: int, unwatched: range) -> None:
    """``held_up``: in its third wait, ms."""
    sleeper = Sleeper(ops=ops, held_up={2: held_up * MS})
    assert sleeper.slept(again) == slept * MS
    assert max(sleeper.waits, default=0) <= 100 * MS
    assert sleeper.unwatched // MS in unwatched


def test_what_a_rate_keeps_back_is_sent_without_a_turn_until_a_submission_is_over() -> None:
    sleeper, pumped = Sleeper(ops=True), list[int]()
    queue = sleeper.thread.job.flow.queue
    queue.again, queue.submissions = NOW + MS, 2

    def pump(now: int) -> None:
        pumped.append(now - NOW)
        queue.again, queue.submissions = now + MS, 2 - (len(pumped) == 5)

    queue.pump = pump
    assert sleeper.slept() == 5 * MS
    assert pumped == [MS * (1 + i) for i in range(5)]


def test_a_full_socket_is_waited_for_after_a_turn() -> None:
    """Which sockets are waited for is said when the thread begins to sleep."""
    sleeper = Sleeper(ops=True)
    queue = sleeper.thread.job.flow.queue
    queue.again, queue.submissions, queue.pump = NOW + MS, 2, lambda _: setattr(queue, "full", {0})
    assert sleeper.slept() == MS


def test_a_question_that_found_a_full_socket_leaves_as_soon_as_there_is_room() -> None:
    """With rows the send queue asks for room; a single packet behind the last of them waited for the next turn."""
    sleeper = Sleeper()
    sleeper.thread.job.sender.deferred = ((1, b"?"),)
    sleeper.slept()
    assert sleeper.wanted == {0}


def test_time_that_sending_takes_is_no_wait_for_a_core() -> None:
    sleeper, late = Sleeper(ops=True), list[int]()
    queue = sleeper.thread.job.flow.queue
    sleeper.thread.job.overtime.woke = lambda each, held_up: late.append(each)
    queue.again, queue.submissions = NOW + MS, 1

    def pump(now: int) -> None:
        sleeper.now += 4 * MS
        queue.again = now + MS  # over before the sending was

    queue.pump = pump
    assert sleeper.slept() >= 100 * MS
    assert late
    assert max(late) == 0
    assert min(sleeper.waits) >= 0
