"""Stamps on the transport thread: what they are put around, and whose time counts."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from reference_proof import check_packet
from tailbound.collective.waiter import Waiter
from tailbound.transport import sockets
from tailbound_lab.bench.stopwatch import CALLS, COMPILED, Stopwatch

MS = 1_000_000


@dataclass
class Clocks:
    """Processor time of the watched thread and of the one that asks, which passes when somebody says so."""

    now: int = 0

    def spend(self, ns: int) -> None:
        self.now += ns


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(time, "thread_time_ns", lambda: made.now)
    monkeypatch.setattr(time, "clock_gettime_ns", lambda clock: made.now)
    return made


def test_the_outermost_stamp_counts_and_other_threads_do_not(clocks: Clocks) -> None:
    watch = Stopwatch()
    inner = watch.around(CALLS, clocks.spend)

    def outer_function() -> None:
        clocks.spend(3)
        inner(4)

    inner(100)  # no thread is watched yet
    watch.here()
    watch.around(COMPILED, outer_function)()
    inner(50)
    with pytest.raises(ZeroDivisionError):
        watch.around(CALLS, lambda: 1 / 0)()
    thread = threading.Thread(target=inner, args=(1000,))
    thread.start()
    thread.join()
    assert watch.spent == [7, 50]


def test_the_interpreter_has_what_is_left(clocks: Clocks) -> None:
    """Of the time of both threads, which are one here."""
    watch = Stopwatch()
    watch.here()

    def op() -> None:
        watch.around(COMPILED, clocks.spend)(2 * MS)
        watch.around(CALLS, clocks.spend)(3 * MS)
        clocks.spend(4 * MS)

    watch.op(op)
    (parts,) = watch.ops
    assert parts.pop("no_processor") >= 0
    assert parts == {"codec": 2, "system_calls": 3, "interpreter": 2 * 9 - 5}


def test_stamps_are_put_around_compiled_code_and_system_calls_and_taken_out(bound: sockets.UdpSocket) -> None:
    sock = bound
    watch = Stopwatch()
    watch.here()
    data = np.zeros(64, np.uint8)
    expected = int(check_packet(data))
    places = (sockets.UdpSocket, Waiter, os, Dispatcher)
    before = [dict(vars(place)) for place in places]
    waiter = Waiter([sock.fileno()])
    with watch.installed():
        assert int(check_packet(data)) == expected
        assert watch.spent[COMPILED] > 0 == watch.spent[CALLS]
        assert sock.send_one(b"x" * 16, sock.getsockname()) == 0
        assert waiter.wait(10**10) == 1
        assert sock.recv(64) == b"x" * 16
    assert [dict(vars(place)) for place in places] == before
    found = list(watch.spent)
    assert min(found) > 0
    assert int(check_packet(data)) == expected
    assert watch.spent == found
