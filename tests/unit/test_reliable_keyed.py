"""The reliable path in a job with a key: who lacks it is not looked at, and nothing can be changed. Rule: auth-6."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from tailbound.errors import TransportError
from tailbound.transport.reliable import _REQUEST, Refusal, Reliable

COOKIE, KEY = 0xC00C1E, bytes(range(32))
_HEAD = _REQUEST.size


@contextlib.contextmanager
def pair(keys: tuple[bytes, bytes] = (KEY, KEY)) -> Iterator[tuple[Reliable, Reliable]]:
    both = Reliable("127.0.0.1"), Reliable("127.0.0.1")
    peers = [("127.0.0.1", one.port) for one in both]
    for rank, (one, key) in enumerate(zip(both, keys, strict=True)):
        one.start(COOKIE, rank, peers, key)
    try:
        yield both
    finally:
        for one in both:
            one.close()


class Between:
    """Sits between a rank that asks and the one that answers, and turns a bit of what passes one way.

    Attributes:
        at: byte of the next connection in which a bit is turned; -1: none.
        passed: what was asked over the last connection.
    """

    def __init__(self, to: Reliable, asks: bool) -> None:
        self._to, self._asks = to, asks
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.at = -1
        self.passed = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                asks, _ = self._listener.accept()
                answers = socket.create_connection(("127.0.0.1", self._to.port))
                with asks, answers, contextlib.suppress(OSError):
                    self._pass(asks, answers)

    def _pass(self, asks: socket.socket, answers: socket.socket) -> None:
        """One thread for both ways, until either side has closed."""
        count = {True: 0, False: 0}
        self.passed = b""
        while True:
            for one in select.select([asks, answers], [], [])[0]:
                way = one is asks
                data = bytearray(one.recv(1 << 16))
                if not data:
                    return
                if way:
                    self.passed += data
                place = self.at - count[way]
                count[way] += len(data)
                if way == self._asks and 0 <= place < len(data):
                    data[place] ^= 1
                (answers if way else asks).sendall(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


def through(between: Between, asks: Reliable, rank: int) -> None:
    asks._peers[rank] = ("127.0.0.1", between.port)


def test_answers_come_whole() -> None:
    with pair() as (one, other):
        big = random.Random(1).randbytes(3_000_001)
        one.serve("state", lambda request: [b"head", big, b"", request])
        assert other.pull(0, "state", b"which", 20) == b"head" + big + b"which"
        one.serve("nothing", lambda _: [])
        assert other.pull(0, "nothing", b"", 20) == b""
        with pytest.raises(Refusal, match="nobody serves"):
            other.pull(0, "else", b"", 20)
        died = [threading.Event(), threading.Event()]
        one.watch(lambda rank: died[0].set())
        other.watch(lambda rank: died[1].set())
        other.keep(0, 5)
        assert one.forged == other.forged == 0


@pytest.mark.parametrize("keys", [(KEY, bytes(32)), (KEY, b""), (b"", KEY)])
def test_who_lacks_the_key_gets_nothing(keys: tuple[bytes, bytes]) -> None:
    asked = []
    with pair(keys) as (one, other):
        one.serve("state", lambda request: asked.append(request) or [b"secret"])
        with pytest.raises(TransportError) as error:
            other.pull(0, "state", b"", 0.5)
        assert not isinstance(error.value, Refusal)
        assert not asked or not keys[0], "a job without a key answers its own"


@pytest.mark.parametrize("asks", [True, False], ids=["of a request", "of an answer"])
def test_no_byte_can_be_changed(asks: bool) -> None:
    """Each byte of a request and of an answer in turn, those said once among them."""
    with pair() as (one, other):
        one.serve("state", lambda request: [request[::-1]])
        between = Between(one, asks)
        through(between, other, 0)
        size = 16 + _HEAD + 5 + 4 + 16 if asks else 16 + 13 + 16 + 4 + 16
        for at in range(size):
            between.at = at
            waits = asks and 16 + 10 <= at < 16 + _HEAD  # a length: more is waited for
            with pytest.raises(TransportError) as error:
                other.pull(0, "state", b"abcd", 0.05 if waits else 5)
            assert not isinstance(error.value, Refusal)
        between.at = size
        assert other.pull(0, "state", b"abcd", 5) == b"dcba"
        between.close()


def test_a_recorded_request_is_worth_nothing() -> None:
    with pair() as (one, other):
        count = []
        one.serve("state", lambda request: count.append(1) or [b"well"])
        between = Between(one, asks=True)
        through(between, other, 0)
        assert other.pull(0, "state", b"abcd", 5) == b"well"
        between.close()
        with socket.create_connection(("127.0.0.1", one.port)) as again:
            assert len(again.recv(16)) == 16
            again.sendall(between.passed)
            assert again.recv(1) == b""
        assert (len(count), one.forged) == (1, 1)


def test_bytes_at_random_reach_no_handler() -> None:
    with pair() as (one, _):
        asked = []
        one.serve("state", lambda request: asked.append(request) or [])
        chance = random.Random(3)
        for _ in range(150):
            title, body = chance.randbytes(chance.randrange(12)), chance.randbytes(chance.randrange(40))
            cookie, rank = chance.choice([COOKIE, 1]), chance.choice([1, 1, 1, 0, 9])
            head = _REQUEST.pack(0x7B72656C, cookie, rank, len(title), len(body))
            whole = chance.randbytes(16) + head + chance.choice([title, b"state"[: len(title)]]) + body + bytes(16)
            if chance.random() < 0.3:
                whole = chance.randbytes(chance.randrange(1, 120))
            with socket.create_connection(("127.0.0.1", one.port)) as stranger, contextlib.suppress(OSError):
                stranger.settimeout(5)
                nonce = stranger.recv(16)
                stranger.sendall(whole)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(64) == b"", nonce
        assert not asked
        assert one.forged > 20


def test_who_has_not_shown_the_key_holds_a_place_for_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place of the path is taken by connections that say nothing. The bound is shorter here."""
    monkeypatch.setattr("tailbound.transport.reliable._PROOF", 0.05)
    with pair() as (one, other), contextlib.ExitStack() as held:
        one.serve("state", lambda _: [b"well"])
        for _ in range(8 + 2 * 2):
            stranger = held.enter_context(socket.create_connection(("127.0.0.1", one.port)))
            stranger.settimeout(5)
            assert len(stranger.recv(16)) == 16
            stranger.sendall(bytes(7))
        assert stranger.recv(1) == b"", "its time is over"
        assert other.pull(0, "state", b"", 5) == b"well"
