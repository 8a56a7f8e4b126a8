"""The reliable path in a job with a key: who lacks it is not looked at, and nothing can be changed. Rule: auth-6."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from support import await_that, is_renewed
from tailbound.errors import TransportError
from tailbound.transport.places import Places
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


def connected(one: Reliable, other: Reliable) -> tuple[queue.Queue[int], queue.Queue[int]]:
    """Both watch a connection that the second one made: who is told lost, by each."""
    said: tuple[queue.Queue[int], queue.Queue[int]] = queue.Queue(), queue.Queue()
    for each, to in zip((one, other), said, strict=True):
        each.watch(lambda rank, to=to: to.put(rank) or True)  # type: ignore[func-returns-value, misc]
    other.keep(0, 5)
    return said


def line_of(one: Reliable) -> socket.socket:
    """The newest connection to the other rank that it watches."""
    assert one._lifelines is not None
    (found,) = one._lifelines._newest.values()
    return found


@pytest.mark.parametrize("how", ["an end", "a byte"])
def test_a_connection_that_ends_is_no_death_where_the_rank_answers(how: str) -> None:
    """Rule: auth-6."""
    with pair() as (one, other):
        said = connected(one, other)
        before = line_of(one)
        if how == "a byte":
            line_of(other).send(b".")
        else:
            line_of(other).shutdown(socket.SHUT_WR)
        await_that(lambda: one.counts()["lifelines_renewed"] > 0, "the rank is asked")
        await_that(lambda: line_of(one) is not before and line_of(one).fileno() >= 0, "there is another connection")
        assert said[0].empty()
        assert said[1].empty()


@pytest.mark.parametrize("lives", [True, False])
def test_without_a_thread_a_rank_is_asked_all_the_same(monkeypatch: pytest.MonkeyPatch, lives: bool) -> None:
    """Else the end of no connection would be noticed any more."""
    start = threading.Thread.start

    def no_more(thread: threading.Thread) -> None:
        if thread.name == "tailbound-look":
            raise RuntimeError("can't start new thread")
        start(thread)

    with pair() as (one, other):
        said = connected(one, other)
        monkeypatch.setattr(threading.Thread, "start", no_more)
        if not lives:  # as if its process were killed
            other.close(farewell=False)
        else:
            line_of(other).shutdown(socket.SHUT_RDWR)
        if lives:
            await_that(lambda: one.counts()["lifelines_renewed"] > 0, "the rank is asked")
            assert said[0].empty()
        else:
            assert said[0].get(timeout=30) == 1
        assert one._lifelines is not None
        assert one._lifelines._thread.is_alive()


def test_a_death_is_told_and_a_farewell_is_none() -> None:
    """Rule: auth-6."""
    with pair() as (one, other):
        said = connected(one, other)
        other.close()
        line = line_of(one)
        await_that(lambda: line.fileno() < 0, "the farewell has come")
        assert said[0].empty()
        assert one.revived == 0
    with pair() as (one, other):
        said = connected(one, other)
        other.close(farewell=False)  # as if its process were killed: nobody listens, no farewell
        assert said[0].get(timeout=30) == 1


def test_who_ends_connections_makes_one_look_a_second_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule: auth-6."""
    monkeypatch.setattr("tailbound.transport.reliable._LOOK_EVERY", 1000.0)
    with pair() as (one, other):
        said = connected(one, other)

        def waits() -> bool:
            return (one.revived >= 3 and 1 in one._looking) or (is_renewed(one, 4) and False)

        await_that(waits, "three looks at once, and one that waits")
        time.sleep(0.1)
        assert one.revived == 3
        assert 1 in one._looking
        assert said[0].empty()


def test_strangers_give_way_and_who_has_shown_the_key_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user of a rank's host connects all the time, and keeps what it gets. Rule: auth-6."""
    monkeypatch.setattr("tailbound.transport.reliable._PROOF", 30.0)
    with pair() as (one, other), contextlib.ExitStack() as held:
        begun, go_on = threading.Event(), threading.Event()

        def slow(_: bytes) -> list[bytes]:
            begun.set()
            go_on.wait(30)
            return [b"slow"]

        one.serve("slow", slow)
        one.serve("state", lambda _: [b"well"])
        found: list[bytes] = []
        asking = threading.Thread(target=lambda: found.append(bytes(other.pull(0, "slow", b"", 30))))
        asking.start()
        assert begun.wait(20)
        for turn in range(40):
            stranger = held.enter_context(socket.create_connection(("127.0.0.1", one.port)))
            stranger.settimeout(20)
            assert len(stranger.recv(16)) == 16, "there is a place for everybody, for a while"
            if turn % 10 == 9:
                assert other.pull(0, "state", b"", 20) == b"well"
        assert one._places.evicted >= 40 - (8 + 2 * 2)
        go_on.set()
        asking.join(20)
        assert found == [b"slow"]


def test_places() -> None:
    """An address cannot take those of another, and nobody those of whom has shown the key."""
    places = Places(["a", "a", "b"])
    ends = [socket.socketpair() for _ in range(40)]
    socks = iter([end for end, _ in ends])
    try:
        proven = [next(socks) for _ in range(3)]
        for sock in proven:
            assert places.enter(sock, "b", keyed=True)
            assert places.prove(sock)
        assert not places.enter(next(socks), "elsewhere", keyed=True)
        of_b = next(socks)
        assert places.enter(of_b, "b", keyed=True)
        of_a = [next(socks) for _ in range(20)]
        for sock in of_a:
            assert places.enter(sock, "a", keyed=True)
        assert places.prove(of_b)
        assert [places.prove(sock) for sock in of_a] == [False] * 8 + [True] * 10 + [False] * 2, "14 have room in all"
        for sock in proven:
            places.leave(sock)
        assert places.enter(next(socks), "a", keyed=False)
        assert not places.enter(next(socks), "elsewhere", keyed=False)
    finally:
        for pair_ in ends:
            for end in pair_:
                end.close()


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
