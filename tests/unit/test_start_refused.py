"""The start: options that are done without, errors that reach all other ranks at once, and ranks that are missing."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from support import MemoryStore, greeting, patient, team
from tailbound.collective import communicator
from tailbound.collective.communicator import Communicator
from tailbound.errors import CapabilityError, TailboundError, TransportError
from tailbound.transport import keys, rendezvous, sockets
from tailbound.transport.config import Config
from tailbound.transport.rendezvous import exchange
from tailbound.transport.sockets import UdpSocket


@pytest.mark.parametrize(("level", "number", "name"), [(17, 104, "UDP_GRO"), (1, 8, "SO_RCVBUF")])
def test_an_option_that_is_refused_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, level: int, number: int, name: str
) -> None:
    def refuse(sock: UdpSocket, *option: Any) -> None:
        # what an option without privileges falls back to is refused together with it
        if option[:2] == (level, number) or (level == 1 and number in (7, 8) and option[:2] == (1, number + 25)):
            raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))
        socket.socket.setsockopt(sock, *option)

    monkeypatch.setattr(UdpSocket, "setsockopt", refuse)
    monkeypatch.setattr(sockets, "_said", set())
    with team(2, patient()) as job:
        for _, outcome in job.allreduce([np.ones(1000, np.float32)] * 2):
            assert outcome.delivered == outcome.expected
    said = [r.getMessage() for r in caplog.records if "refuses the socket option" in r.getMessage()]
    assert [f"{name} (Protocol not available)" in text for text in said] == [True]


def test_what_cannot_be_done_without_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sock: UdpSocket, *option: Any) -> int:
        raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))

    monkeypatch.setattr(UdpSocket, "getsockopt", refuse)
    with UdpSocket() as sock, pytest.raises(CapabilityError, match="refuses to tell SO_SNDBUF of a UDP socket"):
        sock.room()


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("open_datapath", CapabilityError("no SO_SPARKLES here")),
        ("warm_up", OSError(5, "odd")),
        ("prove", OSError(5, "odd")),
    ],
)
def test_who_cannot_take_part_tells_all_others_at_once(
    monkeypatch: pytest.MonkeyPatch, stage: str, error: Exception
) -> None:
    """They would wait for ``timeout``: longer than this test may take."""
    real, store = getattr(communicator, stage), MemoryStore()

    def fail(*given: Any, **more: Any) -> Any:
        rank = next(one.rank for one in given if hasattr(one, "rank"))
        if rank == 1:
            raise error
        return real(*given, **more)

    monkeypatch.setattr(communicator, stage, fail)
    monkeypatch.setattr("tailbound.collective.hello.LIMIT", 500_000_000)

    def join(rank: int) -> BaseException:
        with pytest.raises((TailboundError, OSError)) as raised:
            Communicator(store, Config(**patient(rank=rank, ranks=3)), datapath="udp", timeout=600).close()
        return raised.value

    with ThreadPoolExecutor(3) as threads:
        said = list(threads.map(join, range(3)))
    assert said[1] is error
    for rank in (0, 2):
        assert type(said[rank]) is (CapabilityError if isinstance(error, CapabilityError) else TransportError)
        assert str(said[rank]).startswith("rank 1 cannot take part: ")
        assert str(error) in str(said[rank])


def test_who_waits_for_a_key_of_a_rank_that_failed_is_told() -> None:
    store = MemoryStore()
    rendezvous.tell_failed(store, "job", 0, CapabilityError("no membarrier"))
    with pytest.raises(CapabilityError, match="rank 0 cannot take part: no membarrier"):
        keys.agree(store, "job", 1, 600, "drawn")


def test_what_others_wait_for_is_named_in_words() -> None:
    for name, what in (("active", "open its sockets and maps"), ("heard", "say whom it hears")):
        with pytest.raises(TransportError, match=rf"rank 1 did not {what} within 0.01 s: start it"):
            rendezvous.share(MemoryStore(), name, "1", 0, 2, "job", 0.01)


# -- ranks that are missing, and what the others are -------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "level"), [(0, logging.WARNING), (4, logging.INFO)])
def test_ranks_that_have_not_called_register_are_named_before_time_is_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, level: int
) -> None:
    """By one of those that wait. Nothing was said for three minutes."""
    monkeypatch.setattr(rendezvous, "_NAMED", 0.05)
    store = MemoryStore()
    for one in (0, 4):
        store.set(f"job/greeting/{one}", json.dumps(asdict(greeting(one, ranks=8))))
    with caplog.at_level(logging.INFO, "tailbound"), pytest.raises(TransportError, match=r"within 0.2 s"):
        exchange(store, greeting(rank, ranks=8), "job", 0.2)
    words = "waits for ranks 1-3, 5-7 of 8: every rank of the group has to call register; timeout=0.2 seconds"
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(level, f"rank {rank} {words}")]


def test_rank_0_says_at_the_start_which_datapath_each_rank_has(caplog: pytest.LogCaptureFixture) -> None:
    with team(3, patient()):
        pass
    assert [r.getMessage() for r in caplog.records if "averages" in r.getMessage()] == [
        "tailbound averages gradients over udp on ranks 0-2"
    ]
