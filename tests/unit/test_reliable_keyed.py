"""The reliable path in a job with a key, and what comes over TCP from anybody, most of it damaged.

Who lacks the key is not looked at, and nothing can be changed. What is well made is answered, and nothing else. After
whatever comes, the next request is answered. Rules: auth-3, auth-6.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from reliable_pair import COOKIE, KEY, pair, slow
from support import await_that, is_renewed
from tailbound.errors import TransportError
from tailbound.transport.reliable import _MAGIC, _NONCE, _REQUEST, _TAG, Refusal, Reliable, _Tags


@pytest.mark.parametrize("keys", [(KEY, bytes(32)), (KEY, b""), (b"", KEY)])
def test_who_lacks_the_key_gets_nothing(keys: tuple[bytes, bytes]) -> None:
    asked = []
    with pair(*keys) as (one, other):
        one.serve("state", lambda request: asked.append(request) or [b"secret"])
        with pytest.raises(TransportError) as error:
            other.pull(0, "state", b"", 0.5)
        assert not isinstance(error.value, Refusal)
        assert not asked or not keys[0], "a job without a key answers its own"


def connected(one: Reliable, other: Reliable) -> queue.Queue[int]:
    """Both watch a connection that the second one made: who is told lost, by either."""
    said = queue.Queue[int]()
    for each in (one, other):
        each.lost = lambda rank: said.put(rank) or True  # type: ignore[func-returns-value]
    other.keep(0, 5)
    return said


def line_of(one: Reliable) -> socket.socket:
    """The newest connection to the other rank that it watches."""
    (found,) = one._lifelines._newest.values()
    return found


@pytest.mark.parametrize("how", ["an end", "a byte"])
def test_a_connection_that_ends_is_no_death_where_the_rank_answers(how: str) -> None:
    """Rule: auth-6."""
    with pair(KEY, KEY) as both:
        said = connected(*both)
        before = line_of(both[0])
        if how == "a byte":
            line_of(both[1]).send(b".")
        else:
            line_of(both[1]).shutdown(socket.SHUT_WR)
        # each may see an end, and the first one makes the connection anew
        await_that(lambda: sum(each.counts()["lifelines_renewed"] for each in both) > 0, "the rank is asked")
        await_that(lambda: before is not line_of(both[0]) and line_of(both[0]).fileno() >= 0, "another connection")
        assert said.empty()


def test_a_death_is_told() -> None:
    """Rule: auth-6."""
    with pair(KEY, KEY) as (one, other):
        said = connected(one, other)
        other.close()  # as if its process were killed: nobody listens
        assert said.get(timeout=30) == 1
        assert one.counts()["lifelines_renewed"] == 0


def test_who_ends_connections_makes_one_look_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule: auth-6."""
    monkeypatch.setattr("tailbound.transport.lifeline._LOOK_EVERY", 1000.0)
    with pair(KEY, KEY) as (one, other):
        said = connected(one, other)

        lines = one._lifelines
        assert lines is not None

        def waits() -> bool:
            return (lines.renewed >= 1 and 1 in lines._due) or (is_renewed(one, 2) and False)

        await_that(waits, "one look at once, and one that waits")
        time.sleep(0.1)
        assert lines.renewed == 1
        assert 1 in lines._due
        assert said.empty()


def test_strangers_give_way_and_who_has_shown_the_key_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user of a rank's host connects all the time, and keeps what it gets. Rule: auth-6."""
    monkeypatch.setattr("tailbound.transport.reliable._PROOF", 30.0)
    with pair(KEY, KEY) as (one, other), contextlib.ExitStack() as held:
        asked, go_on = slow(one)
        one.serve("state", lambda _: [b"well"])
        found = held.enter_context(ThreadPoolExecutor()).submit(other.pull, 0, "slow", b"", 30)
        assert asked.wait(20)
        for turn in range(40):
            stranger = held.enter_context(socket.create_connection(("127.0.0.1", one.port)))
            stranger.settimeout(20)
            assert len(stranger.recv(16)) == 16, "there is a place for everybody, for a while"
            if turn % 10 == 9:
                assert other.pull(0, "state", b"", 20) == b"well"
        assert one.counts()["strangers_evicted"] >= 40 - (8 + 2 * 2)
        go_on.set()
        assert found.result(20) == b"slow"


@pytest.mark.parametrize("key", [b"", KEY])
def test_places(key: bytes) -> None:
    """An address cannot take those of another, and nobody those of whom has shown the key. 14 have room in all."""
    with contextlib.closing(Reliable("127.0.0.1")) as one:
        one._peers, one._key = [("a", 0), ("a", 0), ("b", 0)], key
        proven, of_b, of_a = [Mock() for _ in range(3)], Mock(), [Mock() for _ in range(20)]
        assert all(one._enter(sock, "b") and one._prove(sock) for sock in proven)
        assert not one._enter(Mock(), "elsewhere")
        assert one._enter(of_b, "b")
        entered = [one._enter(sock, "a") for sock in of_a]
        gone = 10 if key else 0
        assert entered == [True] * 20 if key else [True] * 10 + [False] * 10
        assert one._prove(of_b)
        assert [one._prove(sock) for sock in of_a] == [False] * gone + [True] * 10 + [False] * (10 - gone)
        assert [sock.shutdown.called for sock in of_a] == [True] * gone + [False] * (20 - gone)
        assert not one._enter(Mock(), "b")
        for sock in (*proven, of_b, *of_a):
            one._leave(sock)
        assert one._enter(Mock(), "b")
        one._answering.clear()


def test_who_has_not_shown_the_key_holds_a_place_for_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place of the path is taken by connections that say nothing. The bound is shorter here."""
    monkeypatch.setattr("tailbound.transport.reliable._PROOF", 0.05)
    with pair(KEY, KEY) as (one, other), contextlib.ExitStack() as held:
        one.serve("state", lambda _: [b"well"])
        for _ in range(8 + 2 * 2):
            stranger = held.enter_context(socket.create_connection(("127.0.0.1", one.port)))
            stranger.settimeout(5)
            assert len(stranger.recv(16)) == 16
            stranger.sendall(bytes(7))
        assert stranger.recv(1) == b"", "its time is over"
        assert other.pull(0, "state", b"", 5) == b"well"


# -- from anybody ------------------------------------------------------------------------------------------------------


def changed(data: bytes, at: int, bits: int | None, behind: bytes) -> bytes:
    """With these bits turned in a byte (None: cut there), and more behind."""
    if bits is None:
        return data[:at] + behind
    return data[:at] + bytes(byte ^ bits for byte in data[at : at + 1]) + data[at + 1 :] + behind


class Posing:
    """Somebody who poses as either end of the reliable path between ``both`` to the other one."""

    def __init__(self, key: bytes, both: tuple[Reliable, Reliable], listener: socket.socket) -> None:
        self.key, self.both, self._listener = key, both, listener
        self.asked: list[bytes] = []
        both[0].serve("state", lambda request: [self.asked.append(request) or b"well ", request])

    def connected(self) -> tuple[socket.socket, bytes]:
        """A connection to rank 0, and a right request of rank 1 over it."""
        sock = socket.create_connection(("127.0.0.1", self.both[0].port))
        sock.settimeout(20)
        right = _REQUEST.pack(_MAGIC, COOKIE, 1, len(b"state"), len(b"what")) + b"statewhat"
        if self.key:
            own, told = bytes(range(_NONCE)), _exactly(sock, _NONCE)
            right = own + right + _Tags(self.key, told, own, 1, 0).next(right)
        return sock, right

    def request(self, at: int, bits: int | None, behind: bytes) -> None:
        """Rank 1's request to rank 0, changed; what reaches the handler was sent so, and with the key it is whole."""
        sock, right = self.connected()
        with sock:
            sent, before = changed(right, at, bits, behind), len(self.asked)
            with contextlib.suppress(OSError):  # what is refused is not read to its end
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
            answer = _all(sock)
        new = self.asked[before:]
        if sent.startswith(right):
            assert new == [b"what"]
            assert b"well what" in answer
        else:
            assert len(new) <= (0 if self.key else 1)
            assert all(each in sent for each in new)
            assert not (answer and (self.key or at < 10)), "magic, cookie and rank are those of the job"
        assert self.both[1].pull(0, "state", b"next", 20) == b"well next"

    def answer(self, at: int, bits: int | None, behind: bytes) -> None:
        """Somebody between rank 1 and rank 0 changes the answer: it gets what was sent or an error."""
        sent: list[tuple[bytes, bytes]] = []

        def pose() -> None:
            sock, _ = self._listener.accept()
            real = socket.create_connection(("127.0.0.1", self.both[0].port), 20)
            with sock, real, contextlib.suppress(OSError):
                sock.settimeout(20)
                nonce = _exactly(real, _NONCE * bool(self.key))
                first = changed(nonce + bytes(99), at, bits, b"")[: len(nonce)]
                sent.append((nonce, first))
                sock.sendall(first)
                if first == nonce:
                    real.sendall(_exactly(sock, _REQUEST.size + len(b"statewhat") + (_NONCE + _TAG) * bool(self.key)))
                    right = nonce + _all(real)
                    sent[0] = right, changed(right, at, bits, behind)
                    sock.sendall(sent[0][1][len(nonce) :])

        asks = self.both[1]
        true, asks._peers[0] = asks._peers[0], self._listener.getsockname()[:2]
        poser = threading.Thread(target=pose)
        poser.start()
        try:
            found: bytes | None = bytes(asks.pull(0, "state", b"what", 20, most=1 << 12))
            refused = False
        except TransportError as error:
            found, refused = None, isinstance(error, Refusal)
        finally:
            poser.join()
            asks._peers[0] = true
        assert not (self.key and refused)
        right, came = sent[0]
        if came.startswith(right):
            assert found == b"well what"
        else:
            assert found is None or (not self.key and found in came)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = sock.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise ConnectionError("closed")
    return data


def _all(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):  # what is behind a request is not read, which resets the connection
        while piece := sock.recv(1 << 16):
            data += piece
    return data


@contextlib.contextmanager
def posing(key: bytes) -> Iterator[Posing]:
    with pair(key, key) as both, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        yield Posing(key, both, listener)


@pytest.fixture(params=[b"", KEY], ids=["no key", "key"], scope="module")
def both(request: pytest.FixtureRequest) -> Iterator[Posing]:
    with posing(request.param) as made:
        yield made


@pytest.mark.parametrize("bits", [1, 0x80, None])
@pytest.mark.parametrize("way", [Posing.request, Posing.answer])
def test_no_byte_can_be_changed_and_nothing_cut_or_added(both: Posing, way: Callable[..., None], bits: int) -> None:
    """Each byte of a request and of an answer in turn, those said once among them."""
    for at in range(2 * _NONCE + _TAG + _REQUEST.size):
        way(both, at, bits, bytes(at % 3))


def test_a_recorded_request_is_worth_nothing() -> None:
    with posing(KEY) as both:
        sock, recorded = both.connected()
        again, _ = both.connected()
        with sock, again:
            sock.sendall(recorded)
            assert sock.recv(1)
            again.sendall(recorded)
            assert again.recv(1) == b""
        assert (len(both.asked), both.both[0].forged) == (1, 1)
