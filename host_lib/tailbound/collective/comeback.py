"""A rank that has died comes back into a job under way, as a new process at its old address and ports (clock-32).

It finds in the store that the job has begun, and asks the others what part they have in it. Where all of them are new
processes, too, the job begins anew, at step 0. Else it stays *outside* until it enters.

It enters between two steps of a live rank, the donor, which holds meanwhile: in the steps to come nothing is missing
here, and nobody has to wait for more than the transfer. What a process needs to take part beside its replica is told by
the donor: where the step begins in everybody's rings, the owner maps, the scales of all buckets. All others are asked
to take the rank in again, and from then on wait for it as for any other.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import json
import struct
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.collective import jump
from tailbound.collective.job import log
from tailbound.collective.transpose import Scales, Transpose
from tailbound.errors import TransportError
from tailbound.transport.agreement import Agreed, Kind, Message, decode_map, encode_map
from tailbound.transport.reliable import Refusal, Reliable
from tailbound.transport.sequence import Position

#: Names of the requests on the reliable path: what part a rank has, and to take one in.
PART, WELCOME = "part", "welcome"
#: Of a welcome: who comes back, and the step that it begins with.
_WELCOME = struct.Struct("!HI")
#: Seconds for an engine to answer, and for a peer to; between two questions; threads that ask.
_ENGINE, _PEER, _AGAIN, _THREADS = 2.0, 3.0, 0.2, 64


class Part(enum.IntEnum):
    """What part a process has in the job."""

    OUTSIDE = 0  #: the job is under way, and this process is new in it
    BEGINS = 1  #: all processes are new
    INSIDE = 2  #: it has made steps with the others


@dataclass(frozen=True)
class Entrance:
    """Where a job goes on.

    Attributes:
        position: of the next step.
        agreed: the newest owner maps, oldest first.
        exponents: scales that the next op of a key carries on (``Known.exponents``), i16[groups].
    """

    position: Position
    agreed: tuple[Agreed, ...]
    exponents: dict[Scales, NDArray[np.int16]]


def entrance(engine: Transpose) -> Entrance:
    """Where the next step of this rank begins; for ``Transpose.call``, between two steps."""
    job = engine.job
    exponents = {key: known.copy() for key, known in job.exponents.items()}
    return Entrance(job.sequence.entrance(), tuple(engine.maps.agreement.agreed), exponents)


def encode(found: Entrance, ranks: int) -> bytes:
    """An entrance as bytes; ``ranks`` can own rows."""
    told = {
        "position": asdict(found.position),
        "maps": base64.b64encode(encode_map(Message(Kind.SETTLED, 0, found.agreed), ranks)).decode(),
        "exponents": [[*key, known.tolist()] for key, known in found.exponents.items()],
    }
    return json.dumps(told).encode()


def decode(data: bytes, ranks: int) -> Entrance:
    """The entrance in ``data``, for a job in which ``ranks`` can own rows.

    Raises:
        TransportError: it is none.
    """
    try:
        told: dict[str, Any] = json.loads(data)
        message = decode_map(base64.b64decode(told["maps"]), ranks)
        if message is None or message.kind != Kind.SETTLED:
            raise ValueError("no owner maps")
        exponents = {
            (int(bucket), int(numel), int(chunk), int(mode)): np.array(known, np.int16)
            for bucket, numel, chunk, mode, known in told["exponents"]
        }
        return Entrance(jump.decode(json.dumps(told["position"]).encode(), ranks), message.maps, exponents)
    except (ValueError, TypeError, KeyError) as error:
        raise TransportError(
            f"the answer is no entrance ({error}): run the same version of Tailbound on all ranks"
        ) from error


def find_part(peers: Iterable[int], pull: Callable[..., bytes | bytearray], timeout: float) -> Part:
    """What part a new process has: ``OUTSIDE`` if a peer is inside, ``BEGINS`` if all of them are new, too.

    Raises:
        TransportError: neither is so after ``timeout`` seconds.
    """
    until, new = time.monotonic() + timeout, set[int]()
    left = set(peers)
    while left:
        for rank in sorted(left):
            try:
                part = bytes(pull(rank, PART, b"", _PEER, 1))
            except TransportError:
                continue
            if part == bytes([Part.INSIDE]):
                return Part.OUTSIDE
            new.add(rank)
        left -= new
        if left and time.monotonic() >= until:
            raise TransportError(
                f"this process has come back, and of the job's other ranks {sorted(left)} do not answer within "
                f"{timeout:g} s, while no rank is left that could give its state: restart all ranks from a checkpoint"
            )
        time.sleep(_AGAIN if left else 0)
    return Part.BEGINS


def serve(reliable: Reliable, engine: Transpose) -> None:
    """Takes ranks in again that say that they are back."""

    def answer(request: bytes) -> list[bytes]:
        if len(request) != _WELCOME.size:
            raise Refusal(f"a request of {len(request)} bytes")
        rank, step = _WELCOME.unpack(request)
        if rank not in engine.job.membership.peers:
            raise Refusal(f"rank {rank} is none of this job's other ranks")
        try:
            engine.call(lambda: engine.welcome(rank, step)).result(_ENGINE)
        except (TransportError, TimeoutError) as error:
            raise Refusal(f"cannot take rank {rank} in: {error or 'busy'}") from error
        return []

    reliable.serve(WELCOME, answer)


def ask_all(engine: Transpose, reliable: Reliable, step: int) -> set[int]:
    """Asks all peers to take this rank in from ``step`` on; who cannot be reached is gone. Returns who has."""
    job = engine.job
    request = _WELCOME.pack(job.rank, step)

    def ask(rank: int) -> bool:
        try:
            reliable.pull(rank, WELCOME, request, _PEER, 0)
            reliable.keep(rank, _PEER)
        except TransportError as error:
            log.info("rank %d: %s", job.rank, error)
            return False
        return True

    with ThreadPoolExecutor(max(1, min(len(job.peers), _THREADS)), "tailbound-welcome") as threads:
        here = {rank for rank, well in zip(job.peers, threads.map(ask, job.peers), strict=True) if well}
    engine.call(lambda: _part(engine, set(job.peers) - here)).result(_ENGINE)
    return here


def watch(reliable: Reliable, engine: Transpose) -> None:
    """Tells ``engine`` of processes that die; at the start every rank connects to those above it."""

    def died(rank: int) -> None:
        with contextlib.suppress(TransportError):  # this one is closing
            engine.call(lambda: engine.died(rank))

    reliable.watch(died)


def _part(engine: Transpose, ranks: Iterable[int]) -> None:
    for rank in ranks:
        engine.job.membership.bye(rank)
    engine.job.publish_live()
