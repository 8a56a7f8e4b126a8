"""The reliable path: a request and its answer over TCP, point to point, for what must arrive whole.

Slices of a replica's state and where a lost rank jumps to go this way (clock-20, clock-21). It has threads of its own,
and every wait has a time at which it ends. Nothing of the data path waits for it. A peer that is stopped or dead costs
the asker its timeout and no other rank anything.

Frames, network byte order. Request: magic u32, cookie u32, sender u16, length of name u16, length of request u32, name,
request. Answer: magic u32, status u8 (0: well, 1: refused, with a text), length u64, body. One request a connection; it
stays open without another word where the request is for just that (``lifeline``).

In a job with a key (auth-6) the side that is asked begins, with 16 bytes that it has never said before; the request has
16 such bytes of the asker's in front and a tag of 16 bytes behind. The head of the answer and every piece of its body,
of 1 MiB at most, have a tag behind, too. Tags are keyed BLAKE2b, by the job's key, what both have said, who asks, and
the number of the piece. What has no right tag is not looked at. Without a key all of this is empty.

Before its request has come with its tag a connection may be anybody's, also another user's on the host of a rank. Where
all places are taken, the oldest of those from the address that has most gives way to a new one. Who opens that many
from a rank's own address may push out that rank's next one, which then tries again; other addresses do not notice.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import math
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from tailbound.errors import TransportError
from tailbound.forks import keep_from_children
from tailbound.transport.lifeline import Lifelines
from tailbound.wire.address import endpoint, family_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("tailbound")

_MAGIC = 0x7B72656C
_REQUEST = struct.Struct("!IIHHI")
_ANSWER = struct.Struct("!IBQ")
_NAME_MOST, _REQUEST_MOST, _TEXT_MOST = 255, 1 << 16, 1 << 16
#: Seconds that a peer may be silent in the middle of a frame.
_SILENCE = 10.0
#: Seconds in which a request has to be there with its tag, in a job with a key: until then anybody may have sent it.
_PROOF = 1.0
_CHUNK = 1 << 20
#: Who closes waits for so many seconds at most until the answers under way have been sent.
_LINGER = 1.0
#: Seconds until a connection is taken again, after one that could not be taken or answered.
_REST = 0.05
#: Connections that may be open beside two for each rank.
_BESIDE = 8
#: Bytes of a number that is said once, and of a tag.
_NONCE, _TAG = 16, 16
#: Seconds after which a handshake is begun again, twice as many each time.
_DIAL = 0.05
#: Seconds for a connection that is made anew, and for its answer: the process that has it may be stopped.
_RENEWAL = 1.0
#: Name of the request that keeps its connection.
_LIFELINE = "lifeline"

Handler: TypeAlias = "Callable[[bytes], Iterable[Buffer]]"


class Refusal(TransportError):
    """A peer is there and says no; the message has its words. A handler raises it to say so."""


class Unreachable(TransportError):
    """No connection to a peer can be made: no rank listens there, or no packet comes through."""


class Ended(list["Buffer"]):
    """An answer with something to do at its end: ``over()`` is called once it has been sent, or cannot be."""

    def __init__(self, parts: Iterable[Buffer], over: Callable[[], None]) -> None:
        super().__init__(parts)
        self.over = over


class Reliable:
    """Serves requests of the job's other ranks, and asks them.

    Args:
        address: IP address to listen at; peers know ``port`` from the greeting.
        port: TCP port; 0: any.

    Raises:
        TransportError: the address cannot be bound.
    """

    def __init__(self, address: str, port: int = 0) -> None:
        self._address = address
        self._handlers: dict[str, Handler] = {}
        self._cookie, self._rank, self._key, self._nonce = 0, -1, b"", 0
        self._peers: list[tuple[str, int]] = []
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._asking: set[socket.socket] = set()
        self._answering: dict[socket.socket, str] = {}  # the oldest first: address, "" where it is of a rank
        self._answered = threading.Condition(self._lock)
        self._before_close: list[Callable[[], None]] = []
        self._helpers: list[threading.Thread] = []
        #: requests whose tag was wrong, and connections that had to give way before they showed the key
        self.forged, self.evicted = 0, 0
        try:
            self._listener = socket.create_server((address, port), family=family_of(address), backlog=128)
        except OSError as error:
            advice = "end the process that has this port" if port else "choose another interface"
            raise TransportError(
                f"cannot listen for the reliable path at {endpoint(address, port)} ({error}): {advice}"
            ) from error
        #: TCP port, for the greeting
        self.port: int = self._listener.getsockname()[1]
        #: asked where a connection to a rank has ended and no rank listens, whether its process has ended; connections
        #: that ``keep`` has made, here or there, are watched from the beginning
        self.lost: Callable[[int], bool] = lambda rank: False
        self._lifelines = Lifelines(lambda rank: self.keep(rank, _RENEWAL), lambda rank: self.lost(rank))
        keep_from_children(self)

    def descriptors(self) -> list[int]:
        """See ``forks.Owner``."""
        own = [sock.fileno() for sock in (self._listener, *self._asking) if sock.fileno() >= 0]
        return own + self._lifelines.descriptors()

    def start(self, cookie: int, rank: int, peers: Sequence[tuple[str, int]], key: bytes = b"") -> None:
        """Lets requests in; ``peers`` are (address, port) by rank, the own one included; ``key`` is the job's."""
        self._cookie, self._rank, self._peers, self._key = cookie, rank, list(peers), key
        self._nonce = _NONCE if key else 0
        self.runs(self._accept, "tailbound-reliable")

    def serve(self, name: str, handler: Handler) -> None:
        """Answers requests called ``name`` with the buffers that ``handler(request)`` gives, in a thread of their own.

        The handler may wait, but not for ever, and may raise ``Refusal``. It may give an ``Ended``.
        """
        self._handlers[name] = handler

    def counts(self) -> dict[str, int]:
        """What strangers have tried: requests with a wrong tag, connections that had to give way before they showed the
        key, and ends of connections to ranks that then had another one."""
        counts = {"requests_forged": self.forged, "strangers_evicted": self.evicted}
        return counts | {"lifelines_renewed": self._lifelines.renewed}

    def keep(self, rank: int, timeout: float) -> None:
        """Connects to ``rank`` and keeps the connection, which both watch when this returns (``Lifelines``).

        Args:
            rank: who.
            timeout: seconds for the connection, and for the answer.

        Raises:
            TransportError: it cannot be reached, or does not answer in time.
        """
        with self._ask(rank, _LIFELINE, b"", timeout, 0) as (sock, _):
            self._lifelines.hold(rank, sock)

    def pull(
        self, rank: int, name: str, request: bytes, timeout: float, most: int = 1 << 34, rate: float = 0.0
    ) -> bytearray:
        """Asks ``rank`` and returns its answer; takes ``timeout`` seconds at most.

        Args:
            rank, name, request: who is asked, and for what.
            timeout: seconds.
            most: bytes of an answer at most.
            rate: bytes a second; 0: none. With it ``timeout`` is for the answer to begin. Then it has as long as its
                bytes take at this rate, without a pause of more than ``_SILENCE`` seconds.

        Raises:
            Refusal: the peer says no.
            Unreachable: no connection to it can be made.
            TransportError: it does not answer in time, or answers nonsense.
        """
        with self._ask(rank, name, request, timeout, most, rate) as (_, body):
            return body

    @contextmanager
    def _ask(
        self, rank: int, name: str, request: bytes, timeout: float, most: int, rate: float = 0.0
    ) -> Iterator[tuple[socket.socket, bytearray]]:
        """The connection on which ``rank`` has answered, and the answer."""
        until = time.monotonic() + timeout
        what = f"rank {self._rank}: asking rank {rank} for {name!r}"
        if self._over.is_set() or not 0 <= rank < len(self._peers) or rank == self._rank:
            raise TransportError(f"{what}: there is no such peer, or this rank has closed; ask while the job runs")
        kind: type[TransportError] = Unreachable
        try:
            with _dial(self._peers[rank], timeout, self._address) as sock:
                kind = TransportError
                with self._lock:
                    self._asking.add(sock)
                try:
                    if self._over.is_set():
                        raise EOFError("the reliable path was closed")
                    tags = self._request(sock, rank, name, request, until)
                    yield sock, _answer_to(what, sock, tags, until, most, rate)
                finally:
                    with self._lock:
                        self._asking.discard(sock)
        except (OSError, EOFError) as error:
            raise kind(f"{what}: {error or type(error).__name__}; is it running, and may TCP pass?") from error

    def _request(self, sock: socket.socket, rank: int, name: str, request: bytes, until: float) -> _Tags:
        """Sends a request; the tags of its answer."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        title = name.encode()
        head = _REQUEST.pack(_MAGIC, self._cookie, self._rank, len(title), len(request))
        theirs, own = bytes(_receive(sock, self._nonce, until)), secrets.token_bytes(self._nonce)
        tags = _Tags(self._key, theirs, own, self._rank, rank)
        sock.sendall(own + head + title + request + tags.next(head, title, request))
        return tags

    def before_close(self, action: Callable[[], None]) -> None:
        """``action()`` is called once when the path is about to close, while it still answers; it may wait a little."""
        self._before_close.append(action)

    def runs(self, body: Callable[[], None], name: str) -> None:
        """Runs ``body()`` in a thread that ``before_close`` tells to end, and that ``close`` waits for."""
        helper = threading.Thread(target=body, name=name, daemon=True)
        self._helpers.append(helper)
        helper.start()

    def close(self) -> None:
        """Ends the listener, own requests and ``runs``; answers under way end in bounded time. May be called twice."""
        while self._before_close:
            self._before_close.pop()()
        if self._over.is_set():
            return
        self._over.set()
        with self._lock:
            for sock in self._asking:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):  # wakes accept, which close alone would not
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._lifelines.close()  # who connects anew is refused by now
        for helper in self._helpers:
            if helper is not threading.current_thread():
                helper.join(5)
        with self._answered:  # a process that ends now would cut them off
            self._answered.wait_for(lambda: not self._answering, _LINGER)

    def _accept(self) -> None:
        while not self._over.is_set():
            sock = None
            try:
                sock, (address, *_) = self._listener.accept()
                if self._enter(sock, address):
                    threading.Thread(target=self._answer, args=(sock,), name="tailbound-answer", daemon=True).start()
                else:
                    sock.close()
            except (OSError, RuntimeError) as error:  # out of descriptors or threads: the peer asks again
                if not self._over.is_set():  # else ``close`` has woken it
                    log.info("rank %d: a request over the reliable path was turned away: %s", self._rank, error)
                if sock is not None:
                    sock.close()
                    self._leave(sock)
                self._over.wait(_REST)

    def _enter(self, sock: socket.socket, address: str) -> bool:
        """Whether there is a place for ``sock``; a stranger's gives way to it."""
        if all(address != known for known, _ in self._peers):
            return False
        with self._lock:
            if len(self._answering) >= _BESIDE + 2 * len(self._peers):
                strangers = [where for where in self._answering.values() if where]
                if not strangers:
                    return False
                greedy = Counter(strangers).most_common(1)[0][0]
                oldest = next(sock for sock, where in self._answering.items() if where == greedy)
                del self._answering[oldest]
                self.evicted += 1
                with contextlib.suppress(OSError):  # its thread ends by that
                    oldest.shutdown(socket.SHUT_RDWR)
            self._answering[sock] = address if self._key else ""
            return True

    def _prove(self, sock: socket.socket) -> bool:
        """``sock`` has shown the key; whether it is still there."""
        with self._lock:
            if there := sock in self._answering:
                self._answering[sock] = ""
            return there

    def _leave(self, sock: socket.socket) -> None:
        """A request is over."""
        with self._answered:
            self._answering.pop(sock, None)
            self._answered.notify_all()

    def _answer(self, sock: socket.socket) -> None:
        try:
            with sock, contextlib.ExitStack() as ends:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                found = self._take(sock)
                if found is None:
                    return
                sender, name, request, tags = found
                if name == _LIFELINE:
                    head = _ANSWER.pack(_MAGIC, 0, 0)
                    self._lifelines.hold(sender, sock).send(head + tags.next(head))  # which waits for no room
                    return
                status, parts = 0, []
                try:
                    if name not in self._handlers:
                        raise Refusal(f"nobody serves {name!r} here")
                    answer = self._handlers[name](request)
                    if isinstance(answer, Ended):
                        ends.callback(answer.over)
                    parts = [memoryview(part).cast("B") for part in answer]
                except Refusal as refusal:
                    status, parts = 1, [memoryview(str(refusal).encode())]
                except Exception as error:
                    log.exception("rank %d: answering over the reliable path", self._rank)
                    status, parts = 1, [memoryview(f"{type(error).__name__}: {error}".encode())]
                sock.settimeout(_SILENCE)
                head = _ANSWER.pack(_MAGIC, status, sum(part.nbytes for part in parts))
                sock.sendall(head + tags.next(head))
                for pieces in _cut(parts, _CHUNK):
                    for piece in pieces:  # the timeout is that of a call
                        sock.sendall(piece)
                    sock.sendall(tags.next(*pieces))
        except (OSError, EOFError) as error:
            log.debug("rank %d: an answer over the reliable path did not get through: %s", self._rank, error)
        finally:
            self._leave(sock)

    def _take(self, sock: socket.socket) -> tuple[int, str, bytes, _Tags] | None:
        """Who asks for what, and the answer's tags; None for what is not of this job, which gets no answer."""
        patience = _PROOF if self._key else _SILENCE
        until = time.monotonic() + patience
        sock.settimeout(patience)
        own = secrets.token_bytes(self._nonce)
        sock.sendall(own)
        theirs = bytes(_receive(sock, self._nonce, until))
        head = _receive(sock, _REQUEST.size, until)
        magic, cookie, sender, title, length = _REQUEST.unpack(head)
        if (magic, cookie) != (_MAGIC, self._cookie) or sender >= len(self._peers) or sender == self._rank:
            return None
        if title > _NAME_MOST or length > _REQUEST_MOST:
            return None
        name, request = _receive(sock, title, until), bytes(_receive(sock, length, until))
        tags = _Tags(self._key, own, theirs, sender, self._rank)
        if not tags.fits(_receive(sock, tags.size, until), head, name, request):
            with self._lock:
                self.forged += 1
            return None
        return (sender, name.decode(errors="replace"), request, tags) if self._prove(sock) else None


class _Tags:
    """Of the pieces of one exchange, in their order; empty in a job without a key.

    Args:
        key: of the job's reliable path.
        asked, asker: what each side has said that it never said before.
        asks, answers: their ranks.
    """

    def __init__(self, key: bytes, asked: bytes, asker: bytes, asks: int, answers: int) -> None:
        said = asked + asker + struct.pack("!HH", asks, answers)
        self._key = hashlib.blake2b(said, key=key, digest_size=32).digest()
        self._pieces = 0
        self.size = _TAG if key else 0

    def next(self, *parts: Buffer) -> bytes:
        """The tag of the next piece, which consists of ``parts``."""
        if not self.size:
            return b""
        tag = hashlib.blake2b(self._pieces.to_bytes(8, "big"), key=self._key, digest_size=_TAG)
        for part in parts:
            tag.update(part)
        self._pieces += 1
        return tag.digest()

    def fits(self, tag: Buffer, *parts: Buffer) -> bool:
        """Whether ``tag`` is that of the next piece."""
        return hmac.compare_digest(self.next(*parts), bytes(tag))


def _answer_to(what: str, sock: socket.socket, tags: _Tags, until: float, most: int, rate: float) -> bytearray:
    """The answer to a request."""
    head = _receive(sock, _ANSWER.size, until)
    if not tags.fits(_receive(sock, tags.size, until), head):
        raise TransportError(f"{what}: the answer was not made with the job's key; look which program has its TCP port")
    magic, status, length = _ANSWER.unpack(head)
    if magic != _MAGIC or length > (_TEXT_MOST if status else most):
        raise TransportError(f"{what}: the answer is not one ({length} bytes); look which program has its TCP port")
    pause = math.inf
    if rate:
        until, pause = max(until, time.monotonic() + length / rate), _SILENCE
    body = bytearray()
    while len(body) < length:  # room for all of it at once takes longer to make than the giver waits
        piece = _receive(sock, min(_CHUNK, length - len(body)), until, pause)
        if not tags.fits(_receive(sock, tags.size, until, pause), piece):
            raise TransportError(f"{what}: the answer was changed on the way: check who else is on this network")
        body += piece
    if status:
        raise Refusal(f"{what}: {body.decode(errors='replace')}")
    return body


def _cut(parts: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """What ``parts`` (of bytes) hold, in pieces of ``size`` bytes; the last may be shorter. Nothing is copied."""
    piece, left = list[memoryview](), size
    for part in parts:
        while part.nbytes:
            piece.append(part[:left])
            part = part[left:]
            left -= piece[-1].nbytes
            if not left:
                yield piece
                piece, left = [], size
    if piece:
        yield piece


def _dial(peer: tuple[str, int], timeout: float, own: str) -> socket.socket:
    """A connection to ``peer``, from the address ``own``; the socket has ``timeout``, too.

    The kernel repeats the first packet of a handshake after a second, and others wait for what is asked for. So one
    that is not over soon is begun anew, and has twice the time.

    Raises:
        OSError: refused, or not there after ``timeout`` seconds.
    """
    until, pause = time.monotonic() + timeout, _DIAL
    while True:
        left = until - time.monotonic()
        try:
            sock = socket.create_connection(peer, max(min(pause, left), 1e-3), (own, 0))
        except TimeoutError:
            if left <= pause:
                raise TimeoutError("no connection in time") from None
            pause *= 2
        else:
            sock.settimeout(timeout)
            return sock


def _receive(sock: socket.socket, length: int, until: float, pause: float = math.inf) -> bytearray:
    """Exactly ``length`` bytes.

    Args:
        pause: seconds without a byte after which no more is waited for.

    Raises:
        TimeoutError: ``until`` (monotonic seconds) has come. EOFError: the other side has closed.
    """
    data = bytearray(length)
    view, got = memoryview(data), 0
    while got < length:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        sock.settimeout(min(left, pause))
        count = sock.recv_into(view[got:])
        if count == 0:
            raise EOFError("the connection was closed")
        got += count
    return data
