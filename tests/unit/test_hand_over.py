"""Between the training thread, the transport thread and what closes both: nothing is lost or mistaken.

And what the transport thread makes of its own long turns, and of words that it writes while others read them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from support import MS, PATIENCE, Team, gradients, patient, team
from tailbound.collective import transpose
from tailbound.collective.op import Op
from tailbound.collective.speaker import Speaker
from tailbound.collective.transpose import Transpose
from tailbound.datapath.store import allocate, store_of
from tailbound.transport.config import Config

NUMEL = 64 * 256


@pytest.fixture
def pair() -> Iterator[Team]:
    with team(2, patient()) as job:
        yield job


def turn(engine: Transpose) -> None:
    """Returns in the middle of a turn of the engine, which ends after it."""
    done = threading.Event()
    engine._commands.append((Future(), done.set))
    os.eventfd_write(engine._wake, 1)
    assert done.wait(PATIENCE)


def test_what_is_being_launched_is_in_flight(pair: Team) -> None:
    """The thread ended a turn while an op was handed over, and said that nothing was in flight."""

    class Slow(threading.Event):
        def clear(self) -> None:
            super().clear()
            for _ in range(2):  # the second begins after the first has ended
                turn(engine)

    engine, data = pair[0]._engine, gradients("U", 2, NUMEL, seed=1)
    engine._idle = Slow()
    engine._idle.set()
    waits = pair[0].allreduce(data[0], np.empty_like(data[0]))
    assert not pair[0].drain(0)
    pair[1].allreduce(data[1], np.empty_like(data[1])).result(PATIENCE)
    waits.result(PATIENCE)
    assert pair[0].drain(PATIENCE)


def test_who_waits_is_not_woken_with_an_op_in_flight(pair: Team) -> None:
    """At the end of a turn the thread said that nothing was in flight, and took it back where that was wrong."""
    engine, data = pair[0]._engine, gradients("U", 2, NUMEL, seed=1)
    launched, wrong = threading.Event(), list[bool]()
    futures: list[Any] = []

    def launch() -> None:
        futures.append(pair[0].allreduce(data[0], np.empty_like(data[0])))
        launched.set()

    class Late(threading.Event):
        def set(self) -> None:
            if not futures:
                threading.Thread(target=launch).start()
                launched.wait(0.2)  # it has to wait for this turn
            super().set()
            wrong.append(launched.is_set())

    engine._idle = Late()
    turn(engine)
    assert launched.wait(PATIENCE)
    assert not wrong[0]
    assert not pair[0].drain(0)
    pair[1].allreduce(data[1], np.empty_like(data[1])).result(PATIENCE)
    futures[0].result(PATIENCE)


def test_nobody_writes_into_a_descriptor_that_closing_has_given_back(
    pair: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reliable path still hands things over while the transport closes."""
    engine, closed = pair[0]._engine, threading.Event()
    wake, write, close = engine._wake, os.eventfd_write, os.close
    pokes, during = threading.Event(), list[bool]()

    def slow(fd: int, value: int) -> None:
        if threading.current_thread() is poking and fd == wake:
            pokes.set()
            closed.wait(0.2)  # it has to wait for this word
            during.append(closed.is_set())
            if closed.is_set():
                return
        write(fd, value)

    def noted(fd: int) -> None:
        close(fd)
        if fd == wake:
            closed.set()

    poking = threading.Thread(target=engine._poke)
    engine._closing = True
    write(wake, 1)
    engine._thread.join(PATIENCE)
    monkeypatch.setattr(transpose.os, "eventfd_write", slow)
    monkeypatch.setattr(transpose.os, "close", noted)
    poking.start()
    assert pokes.wait(PATIENCE)
    monkeypatch.setattr(engine, "_closing", True)
    engine.close()
    poking.join(PATIENCE)
    assert during == [False]
    assert closed.is_set()


@pytest.mark.parametrize(("each", "stops"), [(100, 0), (400, 3)], ids=["long turns", "stops"])
def test_a_turn_that_is_long_is_no_stop(monkeypatch: pytest.MonkeyPatch, each: int, stops: int) -> None:
    """Rule: clock-14. It codes many large ops; who stands still for so long in a single one has been stopped."""
    with team(1, patient()) as job:
        engine, skew = job[0]._engine, 0
        counters, now, look = engine.job.counters, engine.job.now, engine._advance

        def slow(op: Op, *arguments: Any, **more: Any) -> Any:
            nonlocal skew
            skew += each * MS * (op.label not in seen)
            seen.add(op.label)
            return look(op, *arguments, **more)

        seen = set[int]()
        monkeypatch.setattr(engine.job, "now", lambda: now() + skew)
        monkeypatch.setattr(engine, "_advance", slow)
        stands, go_on = threading.Event(), threading.Event()
        waits = engine.call(lambda: (stands.set(), go_on.wait(PATIENCE)))
        assert stands.wait(PATIENCE)
        before = counters["stops_noticed"]
        data = gradients("U", 1, NUMEL, seed=1)[0]
        futures = [Future[Any]() for _ in range(3 if stops else 6)]
        for bucket, future in enumerate(futures):
            ends = future is futures[-1]
            job[0].launch(bucket, data, np.empty_like(data), last=ends, done=future.set_result)
        begun = time.monotonic()
        go_on.set()
        waits.result(PATIENCE)
        for future in futures:
            future.result(PATIENCE)
        engine.call(lambda: None).result(PATIENCE)
        if time.monotonic() - begun < 0.2:  # else this machine stood still itself
            assert counters["stops_noticed"] - before == stops


def test_the_live_set_is_dated_when_the_kernel_has_it() -> None:
    """Rows of an op that opens while it is written are counted by either set."""
    seen = list[tuple[int, int]]()
    speaker = Speaker(Config(0, 3, width=64), store_of(allocate(64, 64, 64)), None, 7)
    control, peers = speaker.store.control, speaker.store.peers
    speaker.now = lambda: seen.append((int(control["live_peers"][0]), int(peers[1]["live"]))) or len(seen)
    speaker.publish_live()
    speaker.membership.contribution.accuse(1, 0)
    speaker.publish_live()
    assert seen == [(2, 1), (1, 0)]
    assert speaker.live_since == 2
