"""How the transport thread sleeps: long where there is nothing to do, and without missing that it stood still.

And how it waits: for microseconds and for any descriptor; how long for a core, as the kernel counts it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tailbound.collective import terms
from tailbound.collective.terms import RunQueue
from tailbound.collective.transpose import Transpose
from tailbound.collective.waiter import EVENTS, Waiter
from tailbound.transport.config import MS
from tailbound.wire.schema import Event

#: Where the clock begins.
NOW = 10_000 * MS


class Sleeper:
    """A transport thread on a clock that only its waits move; ``held_up`` is added to the wait of that number."""

    def __init__(self, *, ops: bool = False, held_up: dict[int, int] | None = None) -> None:
        self.now, self.waits, self.wanted, self.late = NOW, list[int](), set[int](), list[int]()
        self._held_up = held_up or {}
        self.thread: Any = Transpose.__new__(Transpose)
        self.queue = SimpleNamespace(full=set(), again=0, pump=lambda now: None)
        self.thread.job = SimpleNamespace(
            now=lambda: self.now, flow=SimpleNamespace(queue=self.queue),
            sender=SimpleNamespace(deferred=(), crowded=False),
            overtime=SimpleNamespace(woke=lambda late, held_up: self.late.append(late), held_up=0),
        )  # fmt: skip
        self.thread._waiter = SimpleNamespace(want_room=self.wanted.update, wait=self._wait, ready=0, woken=NOW)
        self.thread._ops = {1: SimpleNamespace()} if ops else {}
        self.thread._stirred, self.thread._holding = lambda: False, SimpleNamespace(again=0)
        self.thread._silence, self.thread._owed, self.thread._awake = 0, 0, NOW
        self.thread._opened, self.thread._soon = list[int](), 0

    def _wait(self, nanoseconds: int) -> int:
        self.now += max(0, nanoseconds) + self._held_up.get(len(self.waits), 0)
        self.waits.append(nanoseconds)
        return 0

    def slept(self, again: int = 0) -> int:
        """Sleeps; returns for how long, in ns."""
        self.thread._sleep(again)
        return self.now - NOW


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
    assert (sleeper.now - sleeper.thread._awake) // MS in unwatched


@pytest.mark.parametrize(
    ("events", "slept"),
    [
        ([[Event.OPENED]], 0.5),
        ([[Event.MAJORITY, Event.TAIL]], 0.5),
        ([[Event.RESULTS_TAIL], [], [Event.OPENED]], 0.5),  # the first of them counts
        ([[Event.COMPLETE]], 0),
        ([[Event.OPENED, Event.RESULTS_COMPLETE]], 0),
    ],
)
def test_a_turn_follows_at_once_when_a_half_is_complete(events: list[list[Event]], slept: float) -> None:
    """``events``: what its waits find, 0.1 ms apart, as long as there is any."""
    sleeper = Sleeper(ops=True)
    found, thread = [*events], sleeper.thread
    thread.job.datapath = SimpleNamespace(events=lambda: [(kind, 7, 0) for kind in found.pop(0)])

    def wait(nanoseconds: int) -> int:
        thread._waiter.ready = EVENTS * bool(found)
        sleeper.now += min(nanoseconds, MS // 10 * (len(events) > 1)) if found else nanoseconds
        return int(thread._waiter.ready)

    thread._waiter.wait = wait
    assert sleeper.slept() <= slept * MS + MS // 10
    assert sleeper.now - NOW >= slept * MS
    assert thread._opened == [7] * sum(kinds.count(Event.OPENED) for kinds in events[: len(events) - len(found)])


@pytest.mark.parametrize(("full", "crowded"), [({0}, False), (set(), True)])
def test_room_in_a_full_socket_is_waited_for(full: set[int], crowded: bool) -> None:
    """Of rows, and of a single packet behind the last of them, which waited for the next turn."""
    sleeper = Sleeper(ops=True)
    sleeper.queue.full, sleeper.thread.job.sender.crowded = full, crowded
    assert (sleeper.slept(), sleeper.wanted) == (100 * MS, {0})


def test_time_that_sending_takes_is_no_wait_for_a_core() -> None:
    sleeper = Sleeper(ops=True)
    sleeper.queue.again = NOW + MS

    def pump(now: int) -> None:
        sleeper.now += 4 * MS
        sleeper.queue.again = now + MS  # over before the sending was

    sleeper.queue.pump = pump
    assert sleeper.slept() >= 100 * MS
    assert set(sleeper.late) == {0}
    assert min(sleeper.waits) >= 0


# -- waiting for descriptors, and for a core --------------------------------------------------------------------------


@pytest.fixture
def made() -> Iterator[list[int]]:
    """Two descriptors of events."""
    fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
    yield fds
    for fd in fds:
        os.close(fd)


def test_a_short_wait_is_short_and_never_early(made: list[int]) -> None:
    waiter, shortest = Waiter(made), 1.0
    for _ in range(50):
        begun = time.monotonic()
        assert waiter.wait(200_000) == 0
        took = time.monotonic() - begun
        assert took >= 200e-6
        shortest = min(shortest, took)
    assert shortest < 1e-3  # poll would have slept a millisecond or two
    assert not waiter.ready


def test_the_time_at_which_it_ended_is_before_the_wait_for_the_interpreter_lock(made: list[int]) -> None:
    waiter = Waiter(made)
    waiter.wait(0)  # compiled before
    with ThreadPoolExecutor() as threads:
        ended = threads.submit(lambda: waiter.wait(50_000_000) or time.monotonic_ns())
        released = time.monotonic_ns() + 1_000_000_000
        ctypes.PyDLL(None).usleep(1_000_000)  # keeps the lock
        assert waiter.woken < released <= ended.result()


def test_what_is_readable_ends_it(made: list[int]) -> None:
    quiet, loud = made
    waiter = Waiter(made)
    with ThreadPoolExecutor() as threads:
        threads.submit(os.eventfd_write, loud, 1)
        assert waiter.wait(60_000_000_000) == 2
    assert waiter.ready == 2
    os.eventfd_write(quiet, 1)
    assert waiter.wait(0) == 3
    for fd in made:
        os.eventfd_read(fd)
    assert waiter.wait(-5) == 0
    assert not waiter.ready


def test_what_the_kernel_says_of_waits_for_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros: it does not count."""
    path = tmp_path / "schedstat"
    monkeypatch.setattr(terms, "_FILE", str(path))
    assert RunQueue().waited() is None
    for text, waited in {"1000 250 3": 250, "0 0 0": None, "": None, "1 2": None, "a b c": None}.items():
        path.write_text(text)
        queue = RunQueue()
        assert queue.waited() == waited
        path.write_text("1000 300 4\n")
        assert queue.waited() == 300
        queue.close()
