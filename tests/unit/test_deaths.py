"""Processes that die, without processes: who is connected to whom, and what is told of an end (clock-14)."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tailbound.collective import deaths
from tailbound.transport.reliable import Reliable

RANKS, PATIENCE = 3, 20.0


class Engine:
    """What ``deaths`` asks of the engine: it runs what it is given, and is told of deaths."""

    def __init__(self) -> None:
        self.told: queue.Queue[int] = queue.Queue()

    def call(self, what: Callable[[], Any]) -> None:
        what()

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
        deaths.watch(path, engine)  # type: ignore[arg-type]
    return engines


def lines_of(path: Reliable) -> dict[int, socket.socket]:
    """Connections of one rank, by the rank at the other end."""
    assert path._lifelines is not None
    return path._lifelines._newest


def test_every_rank_is_connected_to_every_other_once(paths: list[Reliable]) -> None:
    watched(paths)
    for rank, path in enumerate(paths):
        deaths.connect(path, rank, range(rank + 1, RANKS), PATIENCE)
    assert [sorted(lines_of(path)) for path in paths] == [[1, 2], [0, 2], [0, 1]]


def test_who_watches_later_is_waited_for(paths: list[Reliable]) -> None:
    deaths.watch(paths[0], Engine())  # type: ignore[arg-type]
    asked = threading.Event()
    refuse = paths[1]._handlers.get

    def handler(name: str) -> Any:
        asked.set()
        return refuse(name)

    paths[1]._handlers = type("Handlers", (), {"get": staticmethod(handler)})()
    first = threading.Thread(target=deaths.connect, args=(paths[0], 0, [1], PATIENCE))
    first.start()
    assert asked.wait(PATIENCE)  # and was refused
    deaths.watch(paths[1], Engine())  # type: ignore[arg-type]
    first.join(PATIENCE)
    assert list(lines_of(paths[1])) == [0]


def test_an_end_without_a_farewell_is_told_to_all_and_one_with_it_to_nobody(paths: list[Reliable]) -> None:
    engines = watched(paths)
    for rank, path in enumerate(paths):
        deaths.connect(path, rank, range(rank + 1, RANKS), PATIENCE)
    paths[1].close()  # says farewell
    lines_of(paths[2])[0].shutdown(socket.SHUT_RDWR)  # as its kernel does where the process of rank 2 ends
    assert engines[0].told.get(timeout=PATIENCE) == 2
    assert engines[0].told.empty()


def test_who_cannot_be_reached_is_named(paths: list[Reliable], caplog: pytest.LogCaptureFixture) -> None:
    watched(paths)
    paths[2].close()
    deaths.connect(paths[0], 0, [1, 2], 0.1)
    assert "rank 0: no TCP connection to rank(s) [2]" in caplog.text
    assert sorted(lines_of(paths[0])) == [1]
