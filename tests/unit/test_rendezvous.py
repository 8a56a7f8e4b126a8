"""The start: greetings that do not fit, options that are done without, and ranks that fail or are missing."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from support import MemoryStore, greeting, patient, team
from tailbound.collective import communicator
from tailbound.collective.communicator import Communicator
from tailbound.collective.paths import Paths
from tailbound.errors import CapabilityError, ConfigError, LayoutError, TailboundError, TransportError
from tailbound.kernel.net import interface, interface_towards
from tailbound.settings.kinds import LIMITS
from tailbound.transport import keys, rendezvous, sockets
from tailbound.transport.config import Config, Limits
from tailbound.transport.rendezvous import Greeting, check, exchange, share
from tailbound.transport.sockets import UdpSocket

#: Options that have to be equal.
SAME = {"bits": "8", "share_rows": "on"}
speaker = partial(greeting, options=SAME)


def greet(store: MemoryStore, *greetings: Greeting) -> None:
    for one in greetings:
        store.set(f"job/greeting/{one.rank}", json.dumps(asdict(one)))


def said(**fields: Any) -> dict[str, Any]:
    return asdict(speaker(0, **fields))


OLD = said()
del OLD["formats"]
BOTH, NONE = "rank 1 .*rank 0 .*", "the greeting of rank 0 is none"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (said(formats="wire 1, codec 2, hello 3"), r"rank 1 .*codec 5.* rank 0 .*codec 2.*same version of tailbound"),
        (OLD, r"rank 1 .*codec 5.* rank 0 .*None.*same version"),
        (
            {"rank": 0, "formats": "wire 9", "version": "7.0.0", "colour": "red"},
            r"rank 1 runs tailbound 0.1.0 .* 0 runs 7.0.0",
        ),
        (said(width=448), BOTH + "same MTU"),
        (said(model="xyz"), BOTH + "same model"),
        (said(options={"bits": "4", "share_rows": "on"}), BOTH + "bits="),
        (said(options={"bits": "8", "share_rows": "off"}), BOTH + "share_rows="),
        (said(options={"bits": "8"}), BOTH + "the option share_rows"),
        (said(options=SAME | {"quorum": "on"}), BOTH + "the option quorum"),
        (said(ranks=2), "rank 1 has ranks 3, rank 0 has 2: .*same world size"),  # the third one may never come
        (said(address="10.0.0.1"), r"ranks 0 and 1 are 10.0.0.1:5515 .*datapath='udp'"),
        # of another program, which may write anything
        *((text, NONE) for text in ("", "[1]", "null", "[" * 100_000, b"\xff{")),
        (said(port="5515"), NONE),
        (said(options=SAME | {"bits": 8}), NONE),
        (said() | {"rank": 2}, NONE),
        (said(address="127.0.1.1"), r"rank 0 is at 127\.0\.1\.1 and rank 2 at 10\.0\.0\.2.*TAILBOUND_INTERFACE"),
    ],
)
def test_a_greeting_that_does_not_fit_is_told(said: Any, words: str) -> None:
    store = MemoryStore()
    store.set("job/greeting/0", json.dumps(said) if isinstance(said, dict) else said)
    greet(store, speaker(2))
    with pytest.raises(LayoutError, match=words):
        exchange(store, speaker(1), "job", 10)


def test_one_rank_twice() -> None:
    class Overwritten(MemoryStore):
        def set(self, key: str, value: str | bytes) -> None:
            super().set(key, json.dumps(asdict(greeting(1, port=9))) if key.endswith("/1") else value)

    both = Overwritten()
    greet(both, greeting(0), greeting(2))
    with pytest.raises(LayoutError, match=r"two processes say they are rank 1: 10.0.0.1:5515 and 10.0.0.1:9"):
        exchange(both, greeting(1), "job", 10)


@pytest.mark.parametrize("kinds", [("xdp", "udp"), ("udp", "xdp")])
def test_a_rank_over_xdp_shares_its_address_with_nobody(kinds: tuple[str, str]) -> None:
    """What two ranks of one address send each other never comes in by the interface, so the program does not see it."""
    both = [greeting(rank, address="10.0.0.1", port=5515 + rank, datapath=kind) for rank, kind in enumerate(kinds)]
    with pytest.raises(LayoutError, match=r"ranks 0 and 1 .*one rank per interface; use datapath='udp'"):
        check(both)
    check([replace(one, datapath="udp") for one in both])


def test_a_rank_that_does_not_come_is_named() -> None:
    store = MemoryStore()
    greet(store, greeting(0))
    with pytest.raises(TransportError, match=r"rank 2 did not greet within 0.1 s: start it"):
        exchange(store, greeting(1), "job", 0.1)
    words = {"end": "come to the meeting 'end'", "active": "open its sockets and maps", "heard": "say whom it hears"}
    for name, what in words.items():
        with pytest.raises(TransportError, match=f"rank 0 did not {what} within 0.01 s: start it"):
            share(store, name, "", 1, 3, "job", 0.01)


def test_communicators_that_do_not_fit_end_at_once() -> None:
    """Limits are compared in the words of their variable."""
    limits, store = Limits(skip=0.5, stop=None), MemoryStore()
    assert LIMITS.parse(limits.text()) == limits

    def join(rank: int) -> Communicator:
        config = Config(**patient(rank=rank, ranks=2, safeguard=limits if rank else Limits()))
        return Communicator(store, config, datapath="udp", timeout=3)

    with ThreadPoolExecutor(2) as threads:
        for rank, future in enumerate([threads.submit(join, rank) for rank in range(2)]):
            with pytest.raises(LayoutError, match=f"rank {rank} .*rank {1 - rank} .*the option safeguard"):
                future.result()


def test_interface_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found = interface("lo")
    assert found.address == "127.0.0.1"
    assert found.mtu > 1500
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert interface_towards() is None
    monkeypatch.delenv("MASTER_ADDR")
    assert interface_towards() is None


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
    assert caplog.text.count("refuses the socket option") == caplog.text.count(f"{name} (Protocol not available)") == 1


def test_what_cannot_be_done_without_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UdpSocket, "getsockopt", Mock(side_effect=OSError(errno.ENOPROTOOPT, "no such option")))
    with UdpSocket() as sock, pytest.raises(CapabilityError, match="refuses to tell SO_SNDBUF of a UDP socket"):
        sock.room()


@pytest.mark.parametrize(
    ("of", "stage", "error"),
    [
        (communicator, "open_datapath", CapabilityError("no SO_SPARKLES here")),
        (communicator, "warm_up", OSError(5, "odd")),
        (Paths, "prove", OSError(5, "odd")),
    ],
)
def test_who_cannot_take_part_tells_all_others_at_once(
    monkeypatch: pytest.MonkeyPatch, of: Any, stage: str, error: Exception
) -> None:
    """They would wait for ``timeout``: longer than this test may take."""
    real, store = getattr(of, stage), MemoryStore()

    def fail(*given: Any, **more: Any) -> Any:
        rank = next(one.rank for one in (getattr(given[0], "_job", None), *given) if hasattr(one, "rank"))
        if rank == 1:
            raise error
        return real(*given, **more)

    monkeypatch.setattr(of, stage, fail)
    monkeypatch.setattr("tailbound.collective.paths.LIMIT", 500_000_000)

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


@pytest.mark.parametrize("kind", [CapabilityError, ConfigError])
def test_who_waits_for_a_key_of_a_rank_that_failed_is_told(kind: type[TailboundError]) -> None:
    store = MemoryStore()
    rendezvous.tell_failed(store, "job", 0, kind("no membarrier"))
    with pytest.raises(kind, match="rank 0 cannot take part: no membarrier"):
        keys.agree(store, "job", 1, 600, "drawn")


@pytest.mark.parametrize(
    "text", ["failed: ", "failed: 7", 'failed: ["a"]', "failed: [1, 2]", "failed: " + "[" * 100_000]
)
def test_what_is_no_failure_is_what_the_rank_has_said(text: str) -> None:
    """Another program may write anything."""
    store = MemoryStore()
    store.set("job/point/0", text)
    assert rendezvous.wait_for(store, "job/point/0", 0, 1, "come") == text.encode()


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
