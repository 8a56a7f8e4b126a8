"""Part six: what comes over TCP and by the store from anybody: requests, answers and greetings, most of them nonsense.

With the job's key and without, and with a right tag or proof on nonsense: a rank that has the key may still be broken.
What is well made is answered, and nothing else; whatever comes, errors are those that callers expect, the next request
is answered.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from soak.part import Tell, is_over
from support import MemoryStore
from tailbound.errors import LayoutError, TransportError
from tailbound.transport import keys
from tailbound.transport.reliable import _ANSWER, _MAGIC, _NONCE, _REQUEST, _TAG, Refusal, Reliable, _Tags
from tailbound.transport.rendezvous import Greeting, exchange

COOKIE, KEY, MASTER = 0xC00C1E, bytes(range(32)), bytes(range(32, 64))
#: What a request or an answer may have at most (``Reliable``), and what an asker allows here.
_NAME_MOST, _REQUEST_MOST, MOST = 255, 1 << 16, 1 << 12
#: Examples of one seed.
EXAMPLES = 100
_TAGGED = st.sampled_from(["right", "right", "wrong", "none"])
_CUT = st.one_of(st.none(), st.none(), st.integers(0, 120))


class Request(NamedTuple):
    """As somebody writes it; ``named`` and ``long`` are added to the true lengths in its head."""

    magic: int
    cookie: int
    sender: int
    name: bytes
    body: bytes
    named: int
    long: int
    tagged: str
    behind: bytes
    cut: int | None


REQUESTS = st.builds(
    Request,
    magic=st.sampled_from([_MAGIC] * 9 + [0, _MAGIC ^ 1]),
    cookie=st.sampled_from([COOKIE] * 9 + [0, COOKIE + 1]),
    sender=st.sampled_from([1] * 9 + [0, 2, 0xFFFF]),
    name=st.one_of(st.just(b"state"), st.just(b"state"), st.binary(max_size=260)),
    body=st.binary(max_size=60),
    named=st.sampled_from([0] * 8 + [1, 2, 300]),
    long=st.sampled_from([0] * 8 + [-1, 1, _REQUEST_MOST, 0xFFFFFF00]),
    tagged=_TAGGED,
    behind=st.sampled_from([b"", b"", b"more", bytes(100)]),
    cut=_CUT,
)


class Answer(NamedTuple):
    """As somebody writes it; ``long`` is added to the true length in its head."""

    magic: int
    status: int
    body: bytes
    long: int
    head_tagged: str
    body_tagged: str
    cut: int | None


ANSWERS = st.builds(
    Answer,
    magic=st.sampled_from([_MAGIC] * 9 + [0, _MAGIC ^ 1]),
    status=st.sampled_from([0, 0, 0, 1, 7, 255]),
    body=st.binary(max_size=80),
    long=st.sampled_from([0] * 8 + [1, MOST, 1 << 40, (1 << 64) - 200]),
    head_tagged=_TAGGED,
    body_tagged=_TAGGED,
    cut=_CUT,
)

_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
_OWN = Greeting(
    rank=0, ranks=2, wire=1, version="1", address="10.0.0.1", port=7000, width=1408, rows=64, sum_rows=64,
    datapath="udp", model="m", options={"bits": "8"}, cookie=7, nonce="00",
)  # fmt: skip
_FIELDS = sorted(asdict(_OWN))


class Said(NamedTuple):
    """A greeting with other values and fields; ``text`` in its place, where there is one; ``proven`` by the key."""

    changes: dict[str, Any]
    proven: bool
    text: bytes | None


SAID = st.builds(
    Said,
    changes=st.dictionaries(st.one_of(st.sampled_from(_FIELDS), st.text(max_size=6)), _VALUES, max_size=2),
    proven=st.booleans(),
    text=st.one_of(
        st.none(), st.none(), st.none(), st.binary(max_size=40), _VALUES.map(lambda value: json.dumps(value).encode()),
        st.just(b"[" * 100_000),
    ),
)  # fmt: skip


def _tag(how: str, tags: _Tags, *parts: bytes) -> bytes:
    right = tags.next(*parts)
    return {"right": right, "wrong": bytes([right[0] ^ 1]) + right[1:], "none": b""}[how]


class Pair:
    """Two ends of the reliable path, with the key or without, and somebody who talks to both.

    Attributes:
        asked: requests for ``state`` that rank 0 was handed.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
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

    def request(self, given: Request) -> None:
        """Rank 0 answers what is well made, and nothing else."""
        head = _REQUEST.pack(
            given.magic, given.cookie, given.sender, min(len(given.name) + given.named, 0xFFFF),
            max(0, len(given.body) + given.long) & 0xFFFFFFFF,
        )  # fmt: skip
        own, told = bytes(range(_NONCE)), b"" if self._key else None
        with socket.create_connection(("127.0.0.1", self._both[0].port)) as sock:
            sock.settimeout(20)
            if self._key:
                told = _exactly(sock, _NONCE)
            tags = self._tags(told, own, given.sender)
            whole = head + given.name + given.body
            if tags is not None:
                whole = own + whole + _tag(given.tagged, tags, whole)
            whole = (whole + given.behind)[: given.cut]
            before = len(self.asked)
            with contextlib.suppress(OSError):  # what is refused is not read to its end
                sock.sendall(whole)
                sock.shutdown(socket.SHUT_WR)
            answer = _all(sock)
        wanted = self._understood(whole, self._tags(told, own, given.sender))
        assert len(self.asked) - before == (wanted is not None and wanted[0] == b"state")
        if wanted is None:
            assert answer == b""
        elif wanted[0] == b"state":
            assert self.asked[-1] == wanted[1]
            assert b"well " + wanted[1] in answer
        else:
            assert answer[4] == 1, "refused"
        assert self._both[1].pull(0, "state", b"next", 20) == b"well next"

    def _tags(self, told: bytes | None, own: bytes, sender: int) -> _Tags | None:
        return _Tags(self._key, told, own, sender, 0) if told else None

    def _understood(self, whole: bytes, tags: _Tags | None) -> tuple[bytes, bytes] | None:
        """Name and body of the request in what was sent; None: it is none."""
        whole = whole[_NONCE:] if tags is not None else whole
        if len(whole) < _REQUEST.size:
            return None
        magic, cookie, sender, title, length = _REQUEST.unpack(whole[: _REQUEST.size])
        rest = whole[_REQUEST.size :]
        if (magic, cookie, sender) != (_MAGIC, COOKIE, 1) or title > _NAME_MOST or length > _REQUEST_MOST:
            return None
        if len(rest) < title + length:
            return None
        end = _REQUEST.size + title + length
        if tags is not None and whole[end : end + _TAG] != tags.next(whole[:end]):
            return None
        return rest[:title], rest[title : title + length]

    def answer(self, given: Answer) -> None:
        """Rank 1 asks somebody who poses as rank 0: it gets a well made answer, a refusal, or a ``TransportError``."""
        length = len(given.body) + given.long & (1 << 64) - 1
        head = _ANSWER.pack(given.magic, given.status, length)
        sent: list[bytes] = []

        def pose() -> None:
            sock, _ = self._posing.accept()
            with sock, contextlib.suppress(OSError):
                sock.settimeout(20)
                tags = None
                if self._key:
                    sock.sendall(bytes(_NONCE))
                    tags = _Tags(self._key, bytes(_NONCE), _exactly(sock, _NONCE), 1, 0)
                request = _exactly(sock, _REQUEST.size + len(b"state") + len(b"what") + (_TAG if self._key else 0))
                whole = head + given.body
                if tags is not None:
                    end = _REQUEST.size + len(b"state") + len(b"what")
                    assert request[end:] == tags.next(request[:end])
                    whole = head + _tag(given.head_tagged, tags, head)
                    whole += given.body + (_tag(given.body_tagged, tags, given.body) if given.body else b"")
                sent.append(whole[: given.cut])
                sock.sendall(sent[0])

        asks = self._both[1]
        true, asks._peers[0] = asks._peers[0], self._posing.getsockname()[:2]
        poser = threading.Thread(target=pose)
        poser.start()
        found: bytes | str
        try:
            found = bytes(asks.pull(0, "state", b"what", 20, most=MOST))
        except Refusal:
            found = "refused"
        except TransportError:
            found = "nothing"
        finally:
            poser.join()
            asks._peers[0] = true
        assert found == self._expected(given, head, length, len(sent[0]))

    def _expected(self, given: Answer, head: bytes, length: int, came: int) -> bytes | str:
        tag = _TAG if self._key else 0
        if self._key and given.head_tagged != "right":
            return "nothing"
        if given.magic != _MAGIC or length > (1 << 16 if given.status else MOST) or length != len(given.body):
            return "nothing"
        if self._key and given.body and given.body_tagged != "right":
            return "nothing"
        if came < len(head) + tag + length + (tag if given.body else 0):
            return "nothing"
        return "refused" if given.status else given.body


def greeting(said: Said) -> None:
    """A greeting is taken, or refused by an error that says whose it is."""
    for master in (b"", MASTER):
        store = MemoryStore()
        what = asdict(_OWN) | {"rank": 1, "address": "10.0.0.2", "cookie": 0} | said.changes
        own = _OWN
        if master:
            own = Greeting(**(asdict(_OWN) | {"proof": keys.prove(master, asdict(_OWN))}))
        if said.proven:
            what["proof"] = keys.prove(master, what)
        text = json.dumps(what).encode() if said.text is None else said.text
        store.set("job/greeting/1", text)
        verify: Any = (lambda rank, told: keys.verify(MASTER, rank, told)) if master else (lambda rank, told: None)
        found, refused = [], ""
        try:
            found = exchange(store, own, "job", 5, verify)
        except LayoutError as error:
            refused = str(error)
        if refused:
            assert "rank 1" in refused
            continue
        assert said.text is None
        assert said.proven or not master
        assert asdict(found[1]) == what


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


@contextlib.contextmanager
def pair(key: bytes) -> Iterator[Pair]:
    """Closed at the end."""
    both = Pair(key)
    try:
        yield both
    finally:
        both.close()


def tries(both: Pair) -> dict[str, tuple[Any, Callable[[Any], None]]]:
    """Name -> what is drawn, and what has to hold of it."""
    return {"requests": (REQUESTS, both.request), "answers": (ANSWERS, both.answer), "greetings": (SAID, greeting)}


def lacking() -> str:
    """Why this part cannot run here, or nothing."""
    return ""


def work(number: int, seed: int, until: float, tell: Tell) -> None:
    """Seed after seed until ``until`` (monotonic), with the key and without in turn."""
    logging.disable(logging.CRITICAL)
    with pair(b"") as plain, pair(KEY) as keyed:
        while time.monotonic() < until and not is_over():
            for name, (drawn, holds) in tries(keyed if seed % 2 else plain).items():

                def one(what: Any, holds: Callable[[Any], None] = holds) -> None:
                    holds(what)

                common = settings(derandomize=False, database=None, max_examples=EXAMPLES, deadline=None)
                try:
                    seeded(seed)(common(given(drawn)(one)))()
                except Exception:
                    if is_over():
                        return
                    tell("found", f"{name}, seed {seed}:\n{traceback.format_exc()}")
                tell(name, EXAMPLES)
            seed += 1


def said(counts: Counter[str]) -> str:
    """How far it is."""
    return ", ".join(f"{counts[name]:,} {name}" for name in ("requests", "answers", "greetings"))
