"""Waiting for descriptors: microseconds, any descriptor, early ends."""

from __future__ import annotations

import os
import resource
import threading
import time

import pytest

from tailbound.transport.sockets import Waiter


def test_a_short_wait_is_short_and_never_early() -> None:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        waiter, shortest = Waiter([fd]), 1.0
        for _ in range(50):
            begun = time.monotonic()
            assert waiter.wait(200_000) == 0
            took = time.monotonic() - begun
            assert took >= 200e-6
            shortest = min(shortest, took)
        assert shortest < 1e-3  # poll would have slept a millisecond or two
        assert not waiter.readable(fd)
    finally:
        os.close(fd)


def test_what_is_readable_ends_it() -> None:
    quiet, loud = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
    try:
        waiter = Waiter([quiet, loud])
        thread = threading.Thread(target=os.eventfd_write, args=(loud, 1))
        thread.start()
        assert waiter.wait(60_000_000_000) == 1
        thread.join()
        assert waiter.readable(loud)
        assert not waiter.readable(quiet)
        os.eventfd_read(loud)
        assert waiter.wait(-5) == 0
        assert not waiter.readable(loud)
    finally:
        os.close(quiet)
        os.close(loud)


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
