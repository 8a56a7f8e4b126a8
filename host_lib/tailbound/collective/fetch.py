"""Results that were lost are fetched from their owner over the reliable path before an op is decoded (clock-35).

What repair has not brought leaves a rank with another average than the others'. The owner still has it. So a rank whose
second half ends without rows that an owner has published asks for them over TCP, and decodes as soon as they are
there, or when ``config.fetch`` has passed. The transport thread waits for nobody: a thread of its own asks, and what
comes is put into the op between two turns.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tailbound.collective.fetched import ASK
from tailbound.collective.op import Op
from tailbound.collective.repair import Request, decode_repair
from tailbound.collective.retransmit import find
from tailbound.collective.transpose import Transpose
from tailbound.errors import TransportError
from tailbound.transport.reliable import Refusal, Reliable
from tailbound.wire.schema import HEADER_BYTES

log = logging.getLogger("tailbound")

#: Name of the request on the reliable path.
REQUEST = "results"
#: Threads that ask; what they have no time for in an op's time is left.
_THREADS = 8
#: Seconds after which who has not answered is asked a second time, over another connection: TCP takes 200 ms or more to
#: send again what was lost. Not where so many bytes are on their way that they may take as long by themselves.
_AGAIN, _FEW = 0.05, 1 << 16
#: Seconds for the own engine to find what is asked for.
_ENGINE = 2.0


class _Question(NamedTuple):
    """What ``owner`` is asked for, for ``op``, from the time ``asked`` to ``until``."""

    op: Op
    owner: int
    request: bytes
    asked: float
    until: float


def serve(reliable: Reliable, engine: Transpose) -> None:
    """Answers ranks that miss results of this one."""

    def answer(request: bytes) -> list[bytes]:
        try:
            return [engine.call(partial(look_up, engine, request)).result(_ENGINE)]
        except (TransportError, TimeoutError) as error:
            raise Refusal(f"cannot give results: {error or 'busy'}") from error

    reliable.serve(REQUEST, answer)


def look_up(engine: Transpose, request: bytes) -> bytes:
    """The answer to ``request``; for ``Transpose.call``.

    Raises:
        TransportError: it is none, or this rank does not have the results of the op any more.
    """
    if len(request) <= ASK.size:
        raise TransportError(f"a request of {len(request)} bytes: run one version of Tailbound on all ranks")
    label, layout, rows = ASK.unpack_from(request)
    places = decode_repair(request[ASK.size :], 0, rows)
    asked = None if places is None else Request(label, -1, first_half=False, layout=layout, places=places)
    found = None if asked is None else find(engine.window, asked)
    if asked is None or found is None:
        raise TransportError("they are not kept here; call synchronise() to make replicas equal at once")
    packets, _, exists, at, _ = found
    there = at[asked.places]
    there = there[exists[there]]
    engine.job.counters["rows_given"] += len(there)
    return packets[there].tobytes()


def take(op: Op, owner: int, body: bytes | bytearray | None) -> None:
    """``owner`` has answered; for ``Transpose.call``."""
    if op.fetch is not None and not op.finished:
        op.fetch.arrived(op.place, owner, body)
        op.stirred = True


def over(reliable: Reliable, engine: Transpose) -> Callable[[Op, int, bytes, int], None]:
    """Asks over ``reliable``, in threads that end with it; see ``Job.fetch``."""
    questions = queue.SimpleQueue[_Question | None]()
    later = queue.SimpleQueue[_Question | None]()

    def unanswered(question: _Question) -> bool:
        op = question.op
        return not op.finished and op.fetch is not None and question.owner in op.fetch.waiting

    def stride(op: Op) -> int:
        return op.place.layout.shape.results.codes + HEADER_BYTES

    def pull(question: _Question) -> bytes | bytearray | None:
        op, owner, request, _, until = question
        left, most = until - time.monotonic(), op.place.placement.shares[owner] * stride(op)
        if left <= 0 or not unanswered(question):
            return None
        try:
            return reliable.pull(owner, REQUEST, request, left, most)
        except TransportError as error:
            log.debug("%s", error)
            return None

    def run() -> None:
        while (question := questions.get()) is not None:
            body = pull(question)
            try:
                engine.call(partial(take, question.op, question.owner, body))
            except TransportError:
                log.debug("rank %d: closed before rank %d answered", engine.job.rank, question.owner)
        questions.put(None)  # for the next thread

    def run_again() -> None:
        while (question := later.get()) is not None:
            time.sleep(max(0.0, question.asked + _AGAIN - time.monotonic()))  # all wait equally long: in their order
            if unanswered(question):
                questions.put(question)

    def ask(op: Op, owner: int, request: bytes, length: int) -> None:
        now = time.monotonic()
        question = _Question(op, owner, request, now, now + length / 1e9)
        questions.put(question)
        if op.fetch is not None and len(op.fetch.asked[owner]) * stride(op) <= _FEW:
            later.put(question)

    # begun now: to begin a thread takes the engine's a while where others have the interpreter
    threads = [run] * min(_THREADS, engine.job.ranks) + [run_again] if engine.job.config.fetch else []
    for body in threads:
        reliable.runs(body, "tailbound-fetch")
    for each in (questions, later):
        reliable.before_close(partial(each.put, None))
    return ask
