"""How the transport thread sleeps: to the microsecond, for any descriptor, and without missing that it stood still.

And how long it waits for a core, as the kernel counts it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from queue_world import LATER, Told, memory
from support import await_that
from tailbound.collective import waiter
from tailbound.collective.job import Owner
from tailbound.collective.terms import Overtime, Repairs
from tailbound.collective.transpose import Transpose
from tailbound.collective.waiter import Sleep
from tailbound.kernel.core import address, core
from tailbound.kernel.events import Source
from tailbound.transport.config import MS
from tailbound.transport.pace import Pacer
from tailbound.transport.queue import SendQueue
from tailbound.transport.sender import Sender
from tailbound.transport.sockets import UdpSocket
from tailbound.wire.packets import DTYPES, record_of
from tailbound.wire.schema import HALF, OWN_OP, POKED, Event, PacketType, Ready, Sending, Woken

#: When the clock stands, and when the next turn is due.
NOW, END = 10_000 * MS, 10_050 * MS
#: ns of a wait, and after which a thread was stopped.
LONGEST, STOPPED = 100 * MS, 350 * MS


class Sleeper:
    """What a thread sleeps by; its events lie in memory."""

    def __init__(self, sock: UdpSocket) -> None:
        self.made = [os.eventfd(0, os.EFD_NONBLOCK) for _ in Ready]
        self.told, self.overtime = Told(), Overtime(0)
        self.sender = Sender([sock], {1: sock.getsockname(), 2: ("255.255.255.255", 9)})  # refused: no broadcast
        voice = self.told.voice
        self.queue = SendQueue(self.sender, Pacer([1, 2], speed=1e6, most=1e6), voice)
        self.told.terms.overtime = ctypes.addressof(self.overtime)
        self._data, self.positions = np.zeros(4096, np.uint8), np.zeros(2, np.uint64)
        at = self.positions.ctypes.data
        self.sock, self._peers, self.asking = sock, np.zeros(1, DTYPES["tb_peer"]), voice
        self._peers["address"] = 0x0100007F  # 127.0.0.1
        source = Source(0, at, at + 8, self._data.ctypes.data, 4095, socket=sock.fileno(), peers=address(self._peers))
        terms = ctypes.addressof(self.told.terms)
        self._kept, voice.requests, voice.source = (repairs := Repairs(4)), repairs.asked, source.pointer
        words, owner = ctypes.addressof(voice), Owner(terms)
        self._owner = owner, ctypes.addressof(owner)
        self.rest = Sleep(self.made, source, self.queue, terms, words, self._owner[1], longest=LONGEST, stopped=STOPPED)
        self.rest.end, self.rest.awake = END, NOW

    def event(self, kind: Event, op: int = 7) -> None:
        """The kernel says so."""
        at = int(self.positions[1])
        words = np.array([16, 0, kind, op, 0, 0], np.uint32)
        self._data[at : at + 24] = words.view(np.uint8)
        self.positions[1] += 24

    def look_out(self, ready: int = 0, now: int = NOW) -> int:
        """It wakes up."""
        self.rest.ready = ready
        if ready & Ready.HANDED:
            os.eventfd_write(self.made[0], POKED)
        if ready & Ready.CONTROLS:
            self.sock.sendto(bytes(64), self.sock.getsockname())  # what the library does not know
        return int(core().fast.tb_look_out(self.rest.pointer, now))

    def first(self, now: int = NOW) -> int:
        """When it wakes up first, ns from then."""
        return int(core().fast.tb_first(self.rest.pointer, now)) - now


@pytest.fixture
def sleeper(bound: UdpSocket) -> Iterator[Sleeper]:
    made = Sleeper(bound)
    yield made
    for fd in made.made:
        os.close(fd)


@pytest.mark.parametrize(
    ("end", "due", "first"),
    [
        (50, {}, 50),
        (1000, {}, 100),  # it breathes
        (50, {"owed": 3}, 3),
        (50, {"soon": 2, "owed": 3}, 2),
        (50, {"listen": 4}, 4),
        (50, {"again": 5}, 5),
        (50, {"owed": 60}, 50),
    ],
)
def test_when_it_wakes_up_first(sleeper: Sleeper, end: int, due: dict[str, int], first: int) -> None:
    """In ms from now."""
    sleeper.rest.end = NOW + end * MS
    for name, after in due.items():
        owners = {"listen": sleeper.told.terms, "again": sleeper.queue.said, "owed": sleeper.asking}
        setattr(owners.get(name, sleeper.rest), "again" if name == "owed" else name, NOW + after * MS)
    assert sleeper.first() == first * MS


@pytest.mark.parametrize(
    ("ready", "said", "found"),
    [
        (0, {}, 0), (Ready.HANDED, {}, Woken.TURN), (Ready.CONTROLS, {}, Woken.SERVE),
        (Ready.CONTROLS, {"end": NOW}, Woken.TURN), (0, {"end": NOW}, Woken.TURN),
        (0, {"soon": NOW}, 0),  # of no op is anything to be done
        (0, {"soon": NOW, "suspects": 1}, Woken.TURN), (0, {"soon": NOW, "holds": 1}, Woken.TURN),
        (0, {"soon": NOW + 1, "holds": 1}, 0), (0, {"again": NOW}, Woken.SEND),
        (Ready.CONTROLS, {"direct": 1, "again": NOW}, Woken.SERVE), (0, {"direct": 1, "again": NOW}, 0),
        (0, {"awake": NOW - STOPPED}, 0),  # one that waited for a core was not stopped
        (0, {"awake": NOW - STOPPED - 1}, Woken.TURN),
    ],
)  # fmt: skip
def test_what_is_to_be_done(sleeper: Sleeper, ready: int, said: dict[str, int], found: int) -> None:
    owners = {"again": sleeper.queue.said, "suspects": sleeper.told.terms, "holds": sleeper.told.terms}
    for name, value in said.items():
        setattr(owners.get(name, sleeper.rest), name, value)
    assert sleeper.look_out(ready) == found
    assert (sleeper.rest.awake == NOW) == (not found & Woken.TURN or "awake" not in said)


def test_a_stirred_op_makes_a_turn_due(sleeper: Sleeper) -> None:
    op = record_of(OWN_OP)(stirred=1)
    sleeper.told.terms.first = ctypes.addressof(op)
    assert sleeper.look_out() == Woken.TURN
    op.stirred = 0
    assert sleeper.look_out() == 0


@pytest.mark.parametrize("kind", Event)
def test_a_turn_may_wait_after_events(sleeper: Sleeper, kind: Event) -> None:
    """For 2 ms, from the first of them."""
    sleeper.event(kind)
    assert sleeper.look_out(Ready.EVENTS) == 0
    assert (sleeper.rest.taken(), sleeper.rest.taken()) == ([7] * (kind == Event.OPENED), [])
    assert sleeper.first() == 2 * MS
    sleeper.event(Event.OPENED, 8)
    assert (sleeper.look_out(Ready.EVENTS, NOW + MS), sleeper.first()) == (0, 2 * MS)
    assert sleeper.look_out(0, NOW + 2 * MS) == Woken.TURN


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, Woken.TURN),
        ({"results_in": 7}, 0),
        ({"layout": 6}, 0),  # of a bucket that is not this one
        ({"sending": Sending.LAUNCHED}, 0),
        ({"own": 1, "results_in": 7}, 0),  # the own row is to be published first
        ({"own": 1, "results_in": 7, "queued": 1}, Woken.TURN),
    ],
)
def test_a_turn_follows_at_once_when_all_results_are_in(sleeper: Sleeper, said: dict[str, int], found: int) -> None:
    half, shares, records = record_of(HALF)(), np.zeros(4, np.int64), np.zeros(1, DTYPES["tb_op"])
    op = record_of(OWN_OP)(sending=Sending.OVER, label=7, layout=5, rows=8, shares=address(shares))
    op.halves[:] = [ctypes.addressof(half)] * 2
    records["op"], records["cookie"], records["results_in"], records["layout"] = 7, sleeper.told.terms.cookie, 8, 5
    sleeper.told.terms.first, sleeper.told.terms.ops = ctypes.addressof(op), address(records)
    for name, value in said.items():
        if name in ("results_in", "layout"):
            records[name] = value
        else:
            setattr(op, name, value)
    sleeper.event(Event.COMPLETE)
    assert sleeper.look_out(Ready.EVENTS) == found


def test_of_more_ops_than_there_is_room_for_the_newest_is_noted(sleeper: Sleeper) -> None:
    for op in range(70):
        sleeper.event(Event.OPENED, op)
    assert sleeper.look_out(Ready.EVENTS) == 0
    assert sleeper.rest.taken() == [*range(63), 69]


def test_what_a_rate_has_kept_back_leaves_without_python(sleeper: Sleeper) -> None:
    queue, rest, rows = sleeper.queue, sleeper.rest, memory(64)
    queue.submit(7, PacketType.RESULT, [(1, rows)], LATER, NOW)
    assert queue.said.left
    assert NOW < queue.again < END
    assert (sleeper.look_out(), sleeper.look_out(0, queue.again)) == (0, Woken.SEND)  # of no system's socket
    rest.direct = 1
    while not queue.empty:
        assert sleeper.look_out(0, queue.again) == 0
    assert queue.said.results == 64


def test_what_is_refused_while_the_thread_sleeps_is_dropped_and_told_of_later(sleeper: Sleeper) -> None:
    queue, rest, op, rows = sleeper.queue, sleeper.rest, record_of(OWN_OP)(switched=1), memory(1)
    own = LATER, NOW, ctypes.addressof(op)
    sleeper.told.gone(3)
    queue.pacer.link.opens = LATER
    queue.submit(1, PacketType.CONTRIBUTION, [(1, rows)], *own)
    queue.submit(2, PacketType.RESULT, [(2, rows)], LATER, NOW)
    queue.submit(3, PacketType.CONTRIBUTION, [], *own)
    queue.pacer.link.opens, queue.said.again, rest.direct = 0, NOW, 1
    assert (sleeper.look_out(), queue.said.refused, queue.said.results, queue.said.left, op.left) == (0, 1, 0, 0, 1)
    queue.tell()
    assert (queue.said.refused, queue.sender.counts[2].errors) == (0, {"EACCES": 1})


def test_a_thread_is_noticed_that_waits_for_the_interpreter_lock() -> None:
    """Where others wait for it; and how late it wakes up."""
    overtime, thread = Overtime(0), Transpose.__new__(Transpose)
    thread.job = SimpleNamespace(overtime=overtime, now=lambda: NOW)  # type: ignore[assignment]
    rest: Any = SimpleNamespace(woken=NOW - 3 * MS, asked=NOW - 4 * MS, ready=0)
    thread._rest = rest
    thread._woke(awaited=False)
    assert (overtime.held_up, overtime.latest) == (0, 4 * MS)
    rest.ready = Ready.CONTROLS
    rest.asked -= MS  # what has arrived has woken it up
    thread._woke(awaited=True)
    assert (overtime.held_up, overtime.latest) == (3 * MS, 4 * MS)


# -- with the machine's clock -----------------------------------------------------------------------------------------


def slept(sleeper: Sleeper, longest: int) -> int:
    """For so many ns at most; returns what is to be done then."""
    now = time.monotonic_ns()
    sleeper.rest.awake, sleeper.rest.end = now, now + longest
    with (turn := Lock()):
        return sleeper.rest.wait(now, turn)


def test_the_time_at_which_it_ended_is_before_the_wait_for_the_interpreter_lock(sleeper: Sleeper) -> None:
    with ThreadPoolExecutor() as threads:
        ended = threads.submit(lambda: slept(sleeper, 50 * MS) and time.monotonic_ns())
        released = time.monotonic_ns() + 1_000_000_000
        ctypes.PyDLL(None).usleep(1_000_000)  # keeps the lock
        assert sleeper.rest.woken < released <= ended.result()


def test_what_is_readable_and_room_in_a_full_socket_end_it(sleeper: Sleeper) -> None:
    """Something handed over is told once."""
    sleeper.queue.said.full = 1
    sleeper.queue.tell = lambda: None  # type: ignore[method-assign]  # it is left to Python
    assert (slept(sleeper, 60_000 * MS), sleeper.rest.ready) == (Woken.SEND, 1 << len(Ready))
    sleeper.queue.said.full = 0
    with ThreadPoolExecutor() as threads:
        for at, ready, found in ((0, Ready.HANDED, Woken.TURN), (2, Ready.CONTROLS, Woken.SERVE)):
            sleeper.sock.sendto(bytes(64), sleeper.sock.getsockname())
            threads.submit(os.eventfd_write, sleeper.made[at], POKED)
            ended = slept(sleeper, 60_000 * MS), sleeper.rest.ready, sleeper.rest.peek()
            assert ended == (found, ready, ready & Ready.CONTROLS)


def test_a_deputy_takes_in_what_comes_while_the_thread_waits_for_the_lock(sleeper: Sleeper) -> None:
    """And leaves to it what only Python can do, also where no turn is due, or it sends; and hides no stop."""

    def written() -> None:
        sleeper.sock.sendto(bytes(64), sleeper.sock.getsockname())
        os.eventfd_write(sleeper.made[2], 1)
        await_that(lambda: sleeper.asking.letters > before, "it is read")

    owner, before = Owner(terms=ctypes.addressof(sleeper.told.terms)), 0
    sleeper.rest.owner = ctypes.addressof(owner)
    sleeper.rest.appoint()
    try:
        now = sleeper.rest.awake = sleeper.queue.said.again = time.monotonic_ns()
        sleeper.rest.end = now + 60_000 * MS
        assert core().waits.tb_sleep(sleeper.rest.pointer, now) == Woken.SEND
        sleeper.rest.awake = now
        sleeper.event(Event.RESULTS_COMPLETE)
        os.eventfd_write(sleeper.made[1], 1)
        await_that(lambda: sleeper.positions[0], "it is taken in")
        written()
        assert core().fast.tb_back(sleeper.rest.pointer) == Woken.TURN | Woken.SEND | Woken.SERVE
        assert sleeper.rest.awake > now
        before = sleeper.asking.letters
        stopped = sleeper.rest.awake = now - 60_000 * MS
        core().waits.tb_pump(sleeper.queue.line, True, 0)
        written()
        core().fast.tb_back(sleeper.rest.pointer)
        assert sleeper.rest.awake == stopped
        assert sleeper.rest.due
    finally:
        sleeper.rest.dismiss()
    assert not sleeper.rest.deputy


def test_the_deputy_hears_that_the_thread_is_back_also_where_its_wait_has_failed(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else both work while the job ends, and ``dismiss`` unlocks what it does not hold."""
    made = Mock()
    made.waits.tb_sleep.return_value, made.fast.tb_back.return_value = -errno.EINVAL, 0
    monkeypatch.setattr(waiter, "core", lambda: made)
    with pytest.raises(OSError, match="Invalid"):
        slept(sleeper, MS)
    assert made.fast.tb_back.called


def test_what_the_kernel_says_of_waits_for_a_core(tmp_path: Path) -> None:
    """Zeros: it does not count."""
    path, overtime = tmp_path / "schedstat", Overtime(0)
    for text, waited in {"1000 250 3": 250, "0 0 0": 250, "": 250, "1": 250, "a b c": 250, "1000 300 4\n": 300}.items():
        path.write_text(text)
        with path.open() as file:
            core().fast.tb_waited(ctypes.addressof(overtime), file.fileno())
        assert (overtime.lacked, overtime.latest) == (waited, 250)
    core().fast.tb_waited(ctypes.addressof(overtime), -1)
    assert overtime.lacked == 300
