"""The reliable path: requests answered whole, refused with words, and never waited for longer than told."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

import reliable_pair
from reliable_pair import COOKIE, KEY
from support import await_that, is_renewed
from tailbound.collective.comeback import ask_each, of_form
from tailbound.errors import TransportError
from tailbound.transport import reliable
from tailbound.transport.reliable import Refusal, Reliable, _dial


@pytest.fixture
def pair() -> Iterator[tuple[Reliable, Reliable]]:
    with reliable_pair.pair() as both:
        yield both
        for one in both:
            one.close()  # the first of two times


@pytest.mark.parametrize("key", [b"", KEY])
def test_answers_come_whole_and_in_order(monkeypatch: pytest.MonkeyPatch, key: bytes) -> None:
    """They take no room before they come: for tens of GB it took longer to make than the giver waits."""
    room, receive = list[int](), reliable._receive

    def received(sock: socket.socket, length: int, until: float, *pause: float) -> bytearray:
        room.append(length)
        return receive(sock, length, until, *pause)

    monkeypatch.setattr(reliable, "_receive", received)
    big = np.random.default_rng(1).integers(0, 256, 2 * reliable._CHUNK + 5, np.uint8)
    with reliable_pair.pair(key, key) as (one, other):
        one.serve("state", lambda request: [b"head", big, request, memoryview(b"tail")])
        assert other.pull(0, "state", b"which", 20) == b"head" + big.tobytes() + b"whichtail"
        assert max(room) == reliable._CHUNK
        one.serve("nothing", lambda _: [])
        assert other.pull(0, "nothing", b"", 20) == b""


def test_refusals_and_errors_have_words(pair: tuple[Reliable, Reliable]) -> None:
    pair[0].serve("late", Mock(side_effect=Refusal("step 7 is over here")))
    pair[0].serve("broken", Mock(side_effect=KeyError("slice")))
    for name, why in ("late", "step 7 is over here"), ("broken", "KeyError: 'slice'"), ("other", "nobody serves 'oth"):
        with pytest.raises(Refusal, match=f"rank 1: asking rank 0 for '{name}': .*{why}"):
            pair[1].pull(0, name, b"", 20)
    for rank in (1, 2, -1):
        with pytest.raises(TransportError, match="no such peer"):
            pair[1].pull(rank, "late", b"", 20)
    pair[0].serve("long", lambda _: [bytes(100)])
    with pytest.raises(TransportError, match="100 bytes"):
        pair[1].pull(0, "long", b"", 20, most=99)


@pytest.mark.parametrize("rate", [0.0, 1000.0, 10.0])
def test_an_answer_that_has_begun_has_time_by_its_size(
    pair: tuple[Reliable, Reliable], monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    """100 bytes at 10 bytes a second may take ten seconds; the clock moves on by five when the head is there."""
    passed, pauses, receive = [0.0], list[float](), reliable._receive

    def received(sock: socket.socket, length: int, until: float, *pause: float) -> bytearray:
        if length == 100:
            passed[0] = 5.0
            pauses.extend(pause)
        return receive(sock, length, until, *pause)

    monkeypatch.setattr(reliable, "_receive", received)
    monkeypatch.setattr(reliable, "time", SimpleNamespace(monotonic=lambda: passed[0]))
    pair[0].serve("long", lambda _: [bytes(100)])
    if rate == 10.0:
        assert pair[1].pull(0, "long", b"", 2.0, rate=rate) == bytes(100)
        assert pauses == [reliable._SILENCE]
    else:
        with pytest.raises(TransportError, match="no answer in time"):
            pair[1].pull(0, "long", b"", 2.0, rate=rate)


@pytest.mark.parametrize("comes", [True, False])
def test_an_answer_is_over_when_it_has_been_sent_or_cannot_be(pair: tuple[Reliable, Reliable], comes: bool) -> None:
    """Not when its handler has returned."""
    asked, go_on, over = threading.Event(), threading.Event(), threading.Event()
    size = 64 * reliable._CHUNK  # no socket has room for so much

    class Slow(reliable.Ended):
        def __iter__(self) -> Iterator[bytes]:
            asked.set()
            go_on.wait(30)
            yield bytes(size)

    pair[0].serve("state", lambda _: Slow([], over.set))
    with socket.create_connection(("127.0.0.1", pair[0].port), 20) as sock:
        sock.sendall(struct.pack("!IIHHI", 0x7B72656C, COOKIE, 1, 5, 0) + b"state")
        assert asked.wait(20)
        assert not over.is_set()
        if comes:
            go_on.set()
            until = time.monotonic() + 30
            head = reliable._receive(sock, reliable._ANSWER.size, until)
            assert head[-8:] == size.to_bytes(8, "big")
            assert not over.is_set()
            reliable._receive(sock, size, until)
    go_on.set()
    assert over.wait(20)


def test_an_answer_that_stops_coming_is_not_waited_for() -> None:
    """However long its bytes may take: the peer may have lost its power."""
    asks, answers = socket.socketpair()
    with asks, answers:
        answers.sendall(b"some")
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            reliable._receive(asks, 100, begun + 60, 0.05)
        assert time.monotonic() - begun < 30


def test_a_peer_that_does_not_answer_costs_the_timeout(pair: tuple[Reliable, Reliable]) -> None:
    _, go_on = reliable_pair.slow(pair[0])
    begun = time.monotonic()
    with pytest.raises(TransportError, match="rank 1: asking rank 0 for 'slow'"):
        pair[1].pull(0, "slow", b"", 0.2)
    assert time.monotonic() - begun < 5
    go_on.set()
    pair[0].close()
    with pytest.raises(TransportError, match="asking rank 0"):
        pair[1].pull(0, "slow", b"", 1)


def test_a_lost_first_packet_does_not_cost_the_kernels_second(pair: tuple[Reliable, Reliable]) -> None:
    """The kernel drops it where a listener has no room; there is room again a moment later."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as opened:
        address = listener.getsockname()
        opened.enter_context(socket.create_connection(address, 5))
        with pytest.raises(TimeoutError):
            socket.create_connection(address, 0.05)
        room = threading.Timer(0.1, lambda: opened.enter_context(listener.accept()[0]))
        room.start()
        found = opened.enter_context(_dial(address, 0.9, "127.0.0.1"))
        assert found.getpeername() == address
        room.join()


def test_each_handshake_has_twice_the_time_for_a_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now, tried = [0.0], list[int]()

    def lost(_: object, left: float, __: object) -> socket.socket:
        tried.append(round(left * 1000))
        now[0] += left
        raise TimeoutError

    monkeypatch.setattr(reliable, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(socket, "create_connection", lost)
    with pytest.raises(TimeoutError, match="in time"):
        _dial(("127.0.0.1", 9), 2.0, "127.0.0.1")
    assert tried == [50, 100, 200, 400, 800, 450]


def test_a_connection_is_watched_at_both_ends_when_it_has_been_made(
    pair: tuple[Reliable, Reliable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailbound.transport.lifeline._LOOK_EVERY", 0.0)
    pair[1].keep(0, 20)
    await_that(lambda: is_renewed(pair[0], 20), "another one, for the twentieth time")


def test_a_port_that_is_taken_is_to_be_freed() -> None:
    """Who comes back has one port only, that the others know."""
    there = Reliable("127.0.0.1")
    with pytest.raises(TransportError, match=f"127.0.0.1:{there.port} .*: end the process that has this port"):
        Reliable("127.0.0.1", there.port)
    there.close()
    with pytest.raises(TransportError, match="choose another interface"):
        Reliable("192.0.2.1")


def test_a_request_without_a_thread_is_turned_away_and_the_next_one_is_answered(
    pair: tuple[Reliable, Reliable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of threads the path of a rank had ended for good, and nobody noticed."""
    start, left = threading.Thread.start, [2]

    def no_more(thread: threading.Thread) -> None:
        if thread.name == "tailbound-answer" and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_more)
    pair[0].serve("state", lambda _: [b"well"])
    for _ in range(2):
        with pytest.raises(TransportError) as error:
            pair[1].pull(0, "state", b"", 20)
        assert not isinstance(error.value, Refusal)
    assert pair[1].pull(0, "state", b"", 20) == b"well"
    with pair[0]._answered:
        assert pair[0]._answered.wait_for(lambda: not pair[0]._answering, 20)


def test_closing_ends_own_requests(pair: tuple[Reliable, Reliable], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    asked, go_on = reliable_pair.slow(pair[0])
    with ThreadPoolExecutor() as threads:
        found = threads.submit(pair[1].pull, 0, "slow", b"", 60)
        assert asked.wait(20)
        pair[1].close()
        with pytest.raises(TransportError, match="closed"):
            found.result(20)
        go_on.set()
    assert "turned away" not in caplog.text


def test_a_request_of_another_size_is_refused() -> None:
    form = struct.Struct("!HI")
    handler = of_form(form, lambda one, two: [bytes([one + two])])
    assert list(handler(form.pack(3, 4))) == [bytes([7])]
    for request in (b"", form.pack(3, 4)[:-1], form.pack(3, 4) + b"x"):
        with pytest.raises(Refusal, match=f"a request of {len(request)} bytes"):
            handler(request)


def test_all_are_asked_at_once_and_who_says_nothing_is_left_out() -> None:
    asked = threading.Barrier(4, timeout=60)

    def ask(rank: int) -> str | None:
        asked.wait()
        if rank == 3:
            raise TransportError("nobody there")
        return None if rank == 5 else f"rank {rank}"

    assert ask_each([7, 3, 5, 1], ask, "asking") == {7: "rank 7", 1: "rank 1"}
    assert ask_each([], ask, "asking") == {}
