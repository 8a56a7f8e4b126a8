"""What comes over TCP and by the store from anybody: requests, answers and greetings, most of them damaged.

Rules: auth-3, auth-6. What is well made is answered, and nothing else; whatever comes, the next request is answered.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import MemoryStore
from tailbound.errors import LayoutError, TransportError
from tailbound.transport import keys
from tailbound.transport.reliable import _ANSWER, _MAGIC, _NONCE, _REQUEST, _TAG, Reliable, _Tags
from tailbound.transport.rendezvous import Greeting, exchange

COOKIE, KEY, MASTER = 0xC00C1E, bytes(range(32)), bytes(range(32, 64))
_MANY = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
#: (place, bits to turn, or None: cut there; what is added behind)
CHANGES = st.lists(st.tuples(st.integers(0, 150), st.one_of(st.none(), st.integers(1, 255))), max_size=3)
BEHIND = st.sampled_from([b"", b"", b"more", bytes(100)])


def changed(data: bytes, changes: list[tuple[int, int | None]], behind: bytes) -> bytes:
    out = bytearray(data)
    for at, bits in changes:
        if bits is None:
            del out[at:]
        elif at < len(out):
            out[at] ^= bits
    return bytes(out) + behind


class Pair:
    """Two ends of the reliable path, with the key or without, and somebody who talks to both."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.asked: list[bytes] = []
        self._both = Reliable("127.0.0.1"), Reliable("127.0.0.1")
        self._posing = socket.create_server(("127.0.0.1", 0))
        self._posing.settimeout(20)
        peers = [("127.0.0.1", one.port) for one in self._both]
        for rank, one in enumerate(self._both):
            one.start(COOKIE, rank, peers, key)
        self._both[0].serve("state", lambda request: [self.asked.append(request) or b"well ", request])

    def close(self) -> None:
        for one in self._both:
            one.close()
        self._posing.close()

    def request(self, changes: list[tuple[int, int | None]], behind: bytes) -> None:
        """Rank 1's request to rank 0, changed; what reaches the handler was sent so, and with the key it is whole."""
        with socket.create_connection(("127.0.0.1", self._both[0].port)) as sock:
            sock.settimeout(20)
            right = _REQUEST.pack(_MAGIC, COOKIE, 1, len(b"state"), len(b"what")) + b"statewhat"
            if self.key:
                own, told = bytes(range(_NONCE)), _exactly(sock, _NONCE)
                right = own + right + _Tags(self.key, told, own, 1, 0).next(right)
            sent, before = changed(right, changes, behind), len(self.asked)
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
        assert self._both[1].pull(0, "state", b"next", 20) == b"well next"

    def answer(self, changes: list[tuple[int, int | None]], behind: bytes) -> None:
        """Somebody who poses as rank 0 answers rank 1: it gets what was sent or an error."""
        sent: list[tuple[bytes, bytes]] = []

        def pose() -> None:
            sock, _ = self._posing.accept()
            with sock, contextlib.suppress(OSError):
                sock.settimeout(20)
                head, body = _ANSWER.pack(_MAGIC, 0, len(b"well")), b"well"
                length = _REQUEST.size + len(b"statewhat")
                if self.key:
                    sock.sendall(bytes(_NONCE))
                    tags = _Tags(self.key, bytes(_NONCE), _exactly(sock, _NONCE), 1, 0)
                    request = _exactly(sock, length + _TAG)
                    assert request[length:] == tags.next(request[:length])
                    head += tags.next(head)
                    body += tags.next(body)
                else:
                    _exactly(sock, length)
                sent.append((head + body, changed(head + body, changes, behind)))
                sock.sendall(sent[0][1])

        asks = self._both[1]
        true, asks._peers[0] = asks._peers[0], self._posing.getsockname()[:2]
        poser = threading.Thread(target=pose)
        poser.start()
        try:
            found: bytes | None = bytes(asks.pull(0, "state", b"what", 20, most=1 << 12))
        except TransportError:  # a refusal is one
            found = None
        finally:
            poser.join()
            asks._peers[0] = true
        right, came = sent[0]
        if came.startswith(right):
            assert found == b"well"
        else:
            assert found is None or (not self.key and found in came)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("closed")
        data += piece
    return data


def _all(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):  # what is behind a request is not read, which resets the connection
        while piece := sock.recv(1 << 16):
            data += piece
    return data


@pytest.fixture(params=[b"", KEY], ids=["no key", "key"], scope="module")
def both(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.close()


@given(changes=CHANGES, behind=BEHIND)
@_MANY
def test_what_is_no_request_reaches_no_handler(both: Pair, changes: Any, behind: bytes) -> None:
    both.request(changes, behind)


@given(changes=CHANGES, behind=BEHIND)
@_MANY
def test_what_is_no_answer_is_an_error(both: Pair, changes: Any, behind: bytes) -> None:
    both.answer(changes, behind)


_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
_OWN = Greeting(
    rank=0, ranks=2, wire=1, version="1", address="10.0.0.1", port=7000, width=1408, rows=64, sum_rows=64,
    datapath="udp", model="m", options={"bits": "8"}, cookie=7, nonce="00",
)  # fmt: skip


@given(
    changes=st.dictionaries(
        st.one_of(st.sampled_from(sorted(asdict(_OWN))), st.text(max_size=6)), _VALUES, max_size=2
    ),
    proven=st.booleans(),
    text=st.one_of(st.none(), st.none(), st.binary(max_size=40), _VALUES.map(lambda value: json.dumps(value).encode()),
                   st.just(b"[" * 100_000)),
)  # fmt: skip
@settings(max_examples=300)
def test_what_is_no_greeting_is_refused_by_name(changes: dict[str, Any], proven: bool, text: bytes | None) -> None:
    for master in (b"", MASTER):
        store = MemoryStore()
        what, own = asdict(_OWN) | {"rank": 1, "address": "10.0.0.2", "cookie": 0} | changes, _OWN
        if master:
            own = Greeting(**(asdict(_OWN) | {"proof": keys.prove(master, asdict(_OWN))}))
        if proven:
            what["proof"] = keys.prove(master, what)
        store.set("job/greeting/1", json.dumps(what).encode() if text is None else text)
        verify: Any = (lambda rank, told: keys.verify(MASTER, rank, told)) if master else (lambda rank, told: None)
        refused = ""
        try:
            found = exchange(store, own, "job", 5, verify)
        except LayoutError as error:
            refused = str(error)
        if refused:
            assert "rank 1" in refused
            continue
        assert text is None
        assert proven or not master
        assert asdict(found[1]) == what
