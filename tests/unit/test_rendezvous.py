"""The greeting: ranks that do not fit together hear it before the first packet, with both named."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest

from support import MemoryStore, greeting, patient
from tailbound.collective.communicator import Communicator
from tailbound.errors import LayoutError, TransportError
from tailbound.kernel.net import interface, interface_towards
from tailbound.settings.kinds import LIMITS
from tailbound.transport.config import Config
from tailbound.transport.rendezvous import Greeting, check, exchange, meet
from tailbound.transport.safeguard import Limits

#: With options that have to be equal.
speaker = partial(greeting, options={"bits": "8", "share_rows": "on"})


def greet(store: MemoryStore, *greetings: Greeting) -> None:
    for one in greetings:
        store.set(f"job/greeting/{one.rank}", json.dumps(asdict(one)))


@pytest.mark.parametrize(
    ("field", "value", "advice"),
    [
        ("wire", 2, "same version of tailbound"),
        ("codec", 5, "same version of tailbound"),
        ("hello", 1, "same version of tailbound"),
        ("width", 448, "same MTU"),
        ("model", "xyz", "same model"),
        ("options", {"bits": "4", "share_rows": "on"}, "bits="),
        ("options", {"bits": "8", "share_rows": "off"}, "share_rows="),
        ("options", {"bits": "8"}, "the option share_rows"),
        ("ranks", 2, "same world size"),
    ],
)
def test_what_must_be_equal(field: str, value: Any, advice: str) -> None:
    store = MemoryStore()
    greet(store, speaker(0), speaker(2))
    with pytest.raises(LayoutError, match=f"rank 1 .*rank 0 .*{advice}"):
        exchange(store, speaker(1, **{field: value}), "job", 10)
    store = MemoryStore()
    greet(store, speaker(0), speaker(1, **{field: value}), speaker(2))
    with pytest.raises(LayoutError, match=f"rank 2 .*rank 1 .*{advice}"):
        exchange(store, speaker(2), "job", 10)


_OLD = asdict(greeting(0))
del _OLD["codec"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        # before waiting for ranks that never come
        (asdict(greeting(0, ranks=2)), r"rank 1 has ranks 3, rank 0 has 2: .*world size"),
        (
            {"rank": 0, "wire": 9, "version": "7.0.0", "colour": "red"},
            r"1 runs tailbound 0.1.0 .* 0 runs 7.0.0",
        ),
        # of before codecs had a number: its codes would be summed, and its results taken for others
        (_OLD, r"rank 1 .*codec 4.* rank 0 .*codec 1.*same version"),
        (asdict(greeting(0, address="10.0.0.1")), r"ranks 0 and 1 are 10.0.0.1:5515 .*datapath='udp'"),
    ],
)
def test_a_greeting_that_does_not_fit_is_told(said: dict[str, Any], words: str) -> None:
    store = MemoryStore()
    store.set("job/greeting/0", json.dumps(said))
    greet(store, greeting(2))
    with pytest.raises(LayoutError, match=words):
        exchange(store, greeting(1), "job", 10)


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
    udp = [replace(one, datapath="udp") for one in both]
    check(udp)


def test_a_rank_that_does_not_come_is_named() -> None:
    store = MemoryStore()
    greet(store, greeting(0))
    with pytest.raises(TransportError, match=r"rank 1 of 3: rank 2 did not greet within 0.1 s: start it"):
        exchange(store, greeting(1), "job", 0.1)
    with pytest.raises(TransportError, match=r"rank 0 did not come to the meeting 'end' within 0.1 s"):
        meet(store, "end", 1, 3, "job", 0.1)


@pytest.mark.parametrize(
    ("one", "other", "advice"),
    [
        ({}, {"safeguard": Limits(skip=0.5)}, "the option safeguard"),
        ({}, {"ranks": 3}, "world size"),
    ],
)
def test_communicators_that_do_not_fit_end_at_once(one: Any, other: Any, advice: str) -> None:
    store = MemoryStore()

    def join(rank: int, settings: Any) -> Communicator:
        config = Config(**(patient(rank=rank, ranks=2) | settings))
        return Communicator(store, config, datapath="udp", timeout=3)

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(join, rank, settings) for rank, settings in enumerate((one, other))]
        for rank, future in enumerate(futures):
            with pytest.raises(LayoutError, match=f"rank {rank} .*rank {1 - rank} .*{advice}"):
                future.result()


def test_limits_are_compared_in_the_words_of_their_variable() -> None:
    limits = Limits(skip=0.5, stop=None)
    assert LIMITS.parse(limits.text()) == limits


def test_interface_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found = interface("lo")
    assert found.address == "127.0.0.1"
    assert found.mtu > 1500
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert interface_towards() is None
    monkeypatch.delenv("MASTER_ADDR")
    assert interface_towards() is None


def test_a_loopback_address_among_others_is_refused() -> None:
    greetings = [greeting(0, address="127.0.1.1"), greeting(1), greeting(2)]
    with pytest.raises(LayoutError, match=r"rank 0 is at 127\.0\.1\.1 and rank 2 at 10\.0\.0\.2.*TAILBOUND_INTERFACE"):
        check(greetings)
