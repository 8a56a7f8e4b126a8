"""Waiting for descriptors: microseconds, any descriptor, early ends."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from collections.abc import Iterator

import pytest

from tailbound.collective.waiter import Waiter


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
    assert not waiter.readable(made[0])


def test_the_time_at_which_it_ended_is_before_the_wait_for_the_interpreter_lock(made: list[int]) -> None:
    found = []

    def waits() -> None:
        waiter = Waiter(made)
        waiter.wait(50_000_000)
        found.extend([waiter.woken, time.monotonic_ns()])

    Waiter(made).wait(0)  # compiled before
    thread = threading.Thread(target=waits)
    thread.start()
    released = time.monotonic_ns() + 1_000_000_000
    ctypes.PyDLL(None).usleep(1_000_000)  # keeps the lock
    thread.join()
    assert found[0] < released <= found[1]


def test_what_is_readable_ends_it(made: list[int]) -> None:
    quiet, loud = made
    waiter = Waiter(made)
    thread = threading.Thread(target=os.eventfd_write, args=(loud, 1))
    thread.start()
    assert waiter.wait(60_000_000_000) == 1
    thread.join()
    assert (waiter.readable(quiet), waiter.readable(loud)) == (False, True)
    os.eventfd_read(loud)
    assert waiter.wait(-5) == 0
    assert not waiter.readable(loud)


def test_descriptors_beyond_the_reach_of_select() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1400:
        pytest.skip("missing capability: a limit of 1400 open files (ulimit -n)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1400), hard))
    low = os.eventfd(1, os.EFD_NONBLOCK)
    try:
        high = os.dup2(low, 1300)
        try:
            assert Waiter([high]).wait(0) == 1
        finally:
            os.close(high)
    finally:
        os.close(low)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
