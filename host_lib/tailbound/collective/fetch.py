"""Results that were lost are fetched from their owner over the reliable path before an op is decoded (clock-35).

What repair has not brought leaves a rank with another average than the others'. The owner still has it. So a rank whose
second half ends without rows that an owner has published asks for them over TCP, once, and decodes as soon as they are
there, or when ``config.fetch`` has passed. The transport thread waits for nobody: a thread of its own asks, and what
comes is put into the op between two turns.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

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
#: Questions under way at once: a rank that misses more than that would hold up its peers.
_MOST = 16
#: Seconds for the own engine to find what is asked for.
_ENGINE = 2.0


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
    packets, _, exists, at = found
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
    """Asks over ``reliable``, each owner in a thread of its own; see ``Job.fetch``."""
    room = threading.Semaphore(_MOST)

    def pull(op: Op, owner: int, request: bytes, length: int) -> None:
        most = op.place.placement.shares[owner] * (op.place.layout.shape.codes + HEADER_BYTES)
        try:
            body = reliable.pull(owner, REQUEST, request, length / 1e9, most)
        except TransportError as error:
            log.debug("%s", error)
            body = None
        finally:
            room.release()
        try:
            engine.call(partial(take, op, owner, body))
        except TransportError:
            log.debug("rank %d: closed before rank %d answered", engine.job.rank, owner)

    def ask(op: Op, owner: int, request: bytes, length: int) -> None:
        if not room.acquire(blocking=False):
            take(op, owner, None)
            return
        threading.Thread(target=pull, args=(op, owner, request, length), name="tailbound-fetch", daemon=True).start()

    return ask
