"""Where a lost rank joins the others: asked of one of them over the reliable path, never of all (clock-20).

A rank that was away for longer than the ring lasts cannot count the rows it has missed. A donor tells it where the next
step begins, in labels and in everybody's rings, and the owner maps. Old scales stay until the first
results bring those of the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from tailbound.collective.transpose import Transpose
from tailbound.errors import TransportError
from tailbound.transport.agreement import OPEN, Message, decode_map, encode_map
from tailbound.transport.reliable import Refusal, Reliable
from tailbound.transport.sequence import Position
from tailbound.transport.steps import STEP_MASK
from tailbound.wire.schema import serial_distance

#: Name of the request on the reliable path.
REQUEST = "position"
#: Seconds for the engine of a donor to answer, and for the donor to.
_ENGINE, _DONOR = 2.0, 3.0
_ANSWER_MOST = 1 << 16
#: What parsing bytes that are no answer may raise.
NOISE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)


def serve(reliable: Reliable, engine: Transpose) -> None:
    """Answers ranks that ask where to join."""

    def answer(_: bytes) -> list[bytes]:
        try:
            return [encode(engine.ask(engine.position, _ENGINE), engine.job.world)]
        except TransportError as error:
            raise Refusal(f"cannot say where the next step begins: {error}") from error

    reliable.serve(REQUEST, answer)


def jump(engine: Transpose, pull: Callable[..., bytes | bytearray]) -> int:
    """Asks the live ranks, the newest first, and goes where the first answer says. Returns the steps skipped.

    Args:
        pull: ``Reliable.pull``.

    Raises:
        TransportError: nobody could say, with everybody's reason; or ops are in flight here.
    """
    job = engine.job
    states, own = job.store.peer_states, job.sequence.upcoming
    donors = sorted(job.membership.live, key=lambda rank: -serial_distance(int(states[rank]["newest"]), own))
    reasons = []
    for donor in donors:
        try:
            to = decode(bytes(pull(donor, REQUEST, b"", _DONOR, _ANSWER_MOST)), job.world)
        except (TransportError, ValueError) as error:
            reasons.append(str(error))
            continue
        return engine.ask(partial(engine.jump, to))
    raise TransportError(
        f"rank {job.rank}: nobody said where to join: {'; '.join(reasons) or 'no live rank is left'}. Restart this rank"
    )


def encode(position: Position, ranks: int) -> bytes:
    """A position as bytes; ``ranks`` can own rows."""
    maps = encode_map(Message(0, position.agreed), ranks).hex()
    return json.dumps([position.step, position.result_seq, position.sum_seqs, maps]).encode()


def decode(data: bytes, ranks: int) -> Position:
    """The position in ``data``, for a job in which ``ranks`` can own rows.

    Raises:
        TransportError: it is none.
    """
    try:
        step, result_seq, sums, maps = json.loads(data)
        found = decode_map(bytes.fromhex(maps), ranks)
        position = Position(int(step), int(result_seq), tuple(map(int, sums)), found.maps if found is not None else ())
        in_range = all(0 <= n < 1 << 32 for n in (position.result_seq, *position.sum_seqs))
        settled = position.agreed and position.agreed[-1].since != OPEN
        if not (settled and in_range and 0 <= position.step <= STEP_MASK and len(position.sum_seqs) == ranks):
            raise ValueError("numbers out of range")
        return position
    except NOISE as error:
        raise TransportError(
            f"the answer is no position ({error}): run the same version of Tailbound on all ranks"
        ) from error
