"""Processes that die, without processes: who is connected to whom, and what is told of an end (clock-14)."""

from __future__ import annotations

import ctypes
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from support import await_that, gradients, patient, team
from tailbound.collective import comeback
from tailbound.errors import TransportError
from tailbound.transport.backoff import Policy
from tailbound.transport.lifeline import Lifelines
from tailbound.transport.reliable import Reliable

RANKS, PATIENCE = 3, 20.0


class Engine:
    """What ``comeback`` asks of the engine: it runs what it is given, and is told of comeback."""

    def __init__(self) -> None:
        self.told: queue.Queue[int] = queue.Queue()
        self.asked, self.answers = 0, 0  # questions over UDP; how many of them are answered
        self.busy = 0  # how often it has no time

    def ask(self, what: Callable[[], Any]) -> Any:
        if self.busy:
            self.busy -= 1
            raise TransportError("the transport thread has not answered")
        return what()

    def ask_after(self, rank: int) -> int:
        self.asked += 1
        return self.asked

    def answered(self, rank: int, since: int) -> bool:
        return since <= self.answers

    def died(self, rank: int) -> None:
        self.told.put(rank)


@pytest.fixture
def paths() -> Iterator[list[Reliable]]:
    all_ranks = [Reliable("127.0.0.1") for _ in range(RANKS)]
    for rank, path in enumerate(all_ranks):
        path.start(0xC00C1E, rank, [("127.0.0.1", each.port) for each in all_ranks])
    yield all_ranks
    for path in all_ranks:
        path.close()


def watched(paths: list[Reliable]) -> list[Engine]:
    engines = [Engine() for _ in paths]
    for path, engine in zip(paths, engines, strict=True):
        comeback.watch(path, engine)
    return engines


def lines_of(path: Reliable) -> dict[int, socket.socket]:
    """Connections of one rank, by the rank at the other end."""
    return path._lifelines._newest


def reset(line: socket.socket) -> None:
    """As ``ss -K`` and middleboxes do."""
    assert ctypes.CDLL(None).connect(line.fileno(), bytes(16), 16) == 0  # to AF_UNSPEC: disconnects by an RST


def test_who_refuses_connections_and_answers_over_udp_lives(paths: list[Reliable], monkeypatch: Any) -> None:
    """A firewall refuses TCP. When nothing answers any more the process has ended."""
    monkeypatch.setattr("tailbound.transport.lifeline._AGAIN", Policy(0, 0))
    engines = watched(paths)
    comeback.connect(paths[0], 0, [1], PATIENCE)
    engines[0].answers, engines[0].busy = 5, 2
    paths[1].close()
    assert engines[0].told.get(timeout=PATIENCE) == 1
    assert engines[0].asked == 5 + comeback._ASKED


def test_a_process_that_is_stopped_is_not_dead(paths: list[Reliable], monkeypatch: Any) -> None:
    """Its kernel takes the connection, and nothing answers, over UDP neither, until it goes on."""
    monkeypatch.setattr("tailbound.transport.reliable._RENEWAL", 0.05)
    engines = watched(paths)
    comeback.connect(paths[0], 0, [1], PATIENCE)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        peers, paths[0]._peers = paths[0]._peers, [("127.0.0.1", stopped.getsockname()[1])] * RANKS
        line = lines_of(paths[0])[1]
        monkeypatch.setattr(paths[1]._lifelines, "_connect", Mock(side_effect=TransportError("it does nothing")))
        reset(line)
        waits, _ = stopped.accept()
        time.sleep(0.2)  # longer than it may take to get the connection
        assert engines[0].told.empty()
        assert engines[0].asked == 0
        assert lines_of(paths[0])[1] is line
        paths[0]._peers = peers
        waits.close()
    await_that(lambda: lines_of(paths[0])[1] is not line, "another connection")
    assert engines[0].told.empty()


def test_a_death_is_told_before_all_are_tried_that_cannot_be_reached() -> None:
    """Behind a switch that has failed, say: each takes a second."""
    tried, told, began = list[int](), queue.Queue[int](), threading.Event()

    def connect(rank: int) -> None:
        tried.append(rank)
        began.set()
        if rank == 9:
            raise TransportError("refused") from ConnectionRefusedError()
        await_that(lambda: ends[9].fileno() < 0, "the process has ended")
        raise TransportError("no answer")

    lines = Lifelines(connect, lambda rank: not told.put(rank))
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = {}
        for rank in (1, 2, 3, 9):
            ends[rank] = socket.create_connection(server.getsockname())
            lines.hold(rank, server.accept()[0])
        for rank in (1, 2, 3, 9):
            ends[rank].close()
            assert began.wait(PATIENCE)
        assert told.get(timeout=PATIENCE) == 9
    lines.close()
    assert tried[:2] == [1, 9]


def test_a_death_is_told_that_came_before_anybody_wanted_to_hear_and_who_cannot_be_reached_is_named(
    paths: list[Reliable], caplog: pytest.LogCaptureFixture
) -> None:
    paths[2].close()
    comeback.connect(paths[0], 0, [1, 2], PATIENCE)
    assert "rank 0: no TCP connection to rank(s) [2]" in caplog.text
    assert sorted(lines_of(paths[0])) == [1]
    paths[1].close()
    await_that(lambda: bool(paths[0]._lifelines._due), "it has been seen")
    assert watched(paths)[0].told.get(timeout=PATIENCE) == 1


def test_a_whole_job_with_a_reset_and_a_rank_that_answers_over_udp() -> None:
    """Rule: clock-14."""
    with team(2, patient(key_file="drawn")) as job:
        for op in range(4):
            job.allreduce(gradients("U", 2, 4096, seed=op))
        reset(lines_of(job[0].reliable)[1])
        await_that(lambda: any(job[rank].stats()["counters"]["lifelines_renewed"] for rank in (0, 1)), "another one")
        engine = job[0]._engine
        since = engine.ask(lambda: engine.ask_after(1))
        await_that(lambda: engine.ask(lambda: engine.answered(1, since)), "a word of it")
        for out in job.allreduce(gradients("U", 2, 4096, seed=9)):
            assert out[1].missing == set()
        assert not any(event["event"] == "rank_died" for rank in (0, 1) for event in job[rank].stats()["events"])
