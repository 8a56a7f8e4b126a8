"""A rank that has died comes back into a job under way, as a new process at its old address and ports (clock-32).

It finds in the store that the job has begun, and asks the others what part they have in it. Where all of them are new
processes, too, the job begins anew, at step 0 and with another cookie. Else it stays *outside* until it enters.

It enters between two steps of a live rank, the donor, which holds meanwhile: in the steps to come nothing is missing
here, and no rank waits for more than the transfer. What a process needs to take part beside its replica is told by the
donor: where the step begins in everybody's rings, and owner maps. All others
are asked to take the rank in again, and from then on wait for it as for any other.
"""

from __future__ import annotations

import enum
import itertools
import json
import struct
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from tailbound.collective import jump
from tailbound.collective.job import log
from tailbound.collective.transpose import Transpose
from tailbound.errors import TransportError
from tailbound.transport.backoff import Policy
from tailbound.transport.config import MS
from tailbound.transport.reliable import Refusal, Reliable
from tailbound.transport.requests import AT_ONCE, ask_each, of_form
from tailbound.transport.sequence import Position

#: Names of the requests on the reliable path: what part a rank has, and to take one in.
PART, WELCOME = "part", "welcome"
#: Of a welcome: who comes back, and the step that it begins with; of its answer: the present stamp of who answers, 0
#: without a key. Of an answer about the part: that, a cookie, and steps of the job.
_WELCOME, _STAMP, _LIFE = struct.Struct("!HI"), struct.Struct("!Q"), struct.Struct("!BIQH")
#: Seconds for a peer's engine to answer, and for the peer to; between two questions.
_ENGINE, _PEER, _AGAIN = 2.0, 3.0, 0.2
#: How a peer that has not taken this rank in is asked again.
_WELCOMES = Policy(200 * MS, 10_000 * MS)


class Part(enum.IntEnum):
    """What part a process has in the job."""

    UNKNOWN = 0  #: it is new, and has not found out yet
    OUTSIDE = 1  #: the job is under way, and this process is new in it
    BEGINS = 2  #: all processes are new
    INSIDE = 3  #: it has made steps with the others


@dataclass(frozen=True)
class Entrance:
    """Where a job goes on.

    Attributes:
        position: of the next step.
        cookie: of the job.
        away: ranks that have said goodbye, or whose processes have ended (clock-38).
    """

    position: Position
    cookie: int
    away: frozenset[int] = frozenset()


def entrance(engine: Transpose) -> Entrance:
    """Where the next step of this rank begins; for ``Transpose.call``, between two steps."""
    job, away = engine.job, engine.job.membership.gone | engine.job.membership.ended
    return Entrance(job.sequence.position(launched=True), job.cookie, frozenset(away))


def encode(found: Entrance, ranks: int) -> bytes:
    """An entrance as bytes; ``ranks`` can own rows."""
    told = {
        "position": jump.encode(found.position, ranks).decode(),
        "cookie": found.cookie,
        "away": sorted(found.away),
    }
    return json.dumps(told).encode()


def decode(data: bytes, ranks: int) -> Entrance:
    """The entrance in ``data``, for a job in which ``ranks`` can own rows.

    Raises:
        TransportError: it is none.
    """
    try:
        told: dict[str, Any] = json.loads(data)
        position = jump.decode(str(told["position"]).encode(), ranks)
        away = frozenset(map(int, told["away"]))
        if not away <= set(range(ranks)):
            raise ValueError(f"there are no ranks {sorted(away)}")
        return Entrance(position, int(told["cookie"]), away)
    except jump.NOISE as error:
        raise TransportError(
            f"the answer is no entrance ({error}): run the same version of Tailbound on all ranks"
        ) from error


class Life(NamedTuple):
    """What a process says of itself: its part, and the cookie that its packets have, or that it proposes."""

    part: Part
    cookie: int
    steps: int = 0  #: of the job so far, where it has a key
    turns: int = 0  #: of keys that came before their time


def tell(reliable: Reliable, life: Callable[[], Life]) -> None:
    """Answers other processes that ask for this one's part."""
    reliable.serve(PART, lambda _: [_LIFE.pack(*life())])


def find_part(
    rank: int, cookie: int, peers: Iterable[int], pull: Callable[..., bytes | bytearray], timeout: float
) -> Life:
    """What part the new process of ``rank`` has, and the cookie that its packets are to have.

    ``OUTSIDE`` if a peer is inside, with the cookie of that one. ``BEGINS`` if none is and all are there, with a cookie
    that this beginning has to itself: kernels keep records of the run before where programs are attached for good, and
    these must not count. It is the one of who begins already, else the one that the lowest new rank proposes.

    Args:
        cookie: what this process proposes.
        pull: ``Reliable.pull``.

    Raises:
        TransportError: neither is so after ``timeout`` seconds.
    """
    until, asked = time.monotonic() + timeout, sorted(peers)

    def ask(peer: int) -> Life | None:
        try:
            part, its, steps, turns = _LIFE.unpack(pull(peer, PART, b"", _PEER, _LIFE.size))
            return Life(Part(part), its, steps, turns)
        except (TransportError, struct.error, ValueError):
            return None

    while True:
        lives = {rank: Life(Part.UNKNOWN, cookie)}
        threads = ThreadPoolExecutor(AT_ONCE, "tailbound-part")
        # the lowest last: its process is the least likely to be another one when it counts
        for some in (asked[1:], asked[:1]):
            answers = {threads.submit(ask, peer): peer for peer in some}
            for answer in as_completed(answers):
                if (life := answer.result()) is None:
                    continue
                lives[answers[answer]] = life
                if life.part == Part.INSIDE:
                    threads.shutdown(wait=False, cancel_futures=True)
                    return Life(Part.OUTSIDE, life.cookie, life.steps, life.turns)
        threads.shutdown()
        silent = [peer for peer in asked if peer not in lives]
        if not silent:
            begun = [life.cookie for life in lives.values() if life.part == Part.BEGINS]
            new = [lives[each].cookie for each in sorted(lives) if lives[each].part == Part.UNKNOWN]
            return Life(Part.BEGINS, (begun or new)[0])
        if time.monotonic() >= until:
            raise TransportError(
                f"this process has come back, and of the job's other ranks {sorted(silent)} do not answer within "
                f"{timeout:g} s, while no rank is left that could give its state: restart all ranks from a checkpoint"
            )
        time.sleep(_AGAIN)


def serve(reliable: Reliable, engine: Transpose) -> None:
    """Takes ranks in again that say that they are back."""

    def answer(rank: int, step: int) -> list[bytes]:
        if rank not in engine.job.membership.peers:
            raise Refusal(f"rank {rank} is none of this job's other ranks")
        try:
            stamp = engine.ask(lambda: engine.welcome(rank, step), _ENGINE)
        except TransportError as error:
            raise Refusal(f"cannot take rank {rank} in: {error}") from error
        return [_STAMP.pack(stamp)]

    reliable.serve(WELCOME, of_form(_WELCOME, answer))


def ask_all(engine: Transpose, reliable: Reliable, step: int) -> set[int]:
    """Asks all peers to take this rank in from ``step`` on. Returns who has.

    No rank waits for the others until their rows come. They are asked again as long as the job lasts: one that heard
    this rank say goodbye sends it nothing before it takes it in.

    Raises:
        TransportError: the own transport thread has ended, or has no time.
    """
    job, over = engine.job, threading.Event()
    request, kept = _WELCOME.pack(job.rank, step), set[int]()

    def ask(rank: int) -> bool:
        try:
            if rank not in kept:
                reliable.keep(rank, _PEER)  # first: from now on the end of the process before says nothing
                kept.add(rank)
            (stamp,) = _STAMP.unpack(reliable.pull(rank, WELCOME, request, _PEER, _STAMP.size))
            engine.call(lambda: engine.welcomed(rank, stamp))
        except (TransportError, struct.error) as error:
            log.info("rank %d: %s", job.rank, error)
            return False
        return True

    def ask_again(left: set[int]) -> None:
        for asked in itertools.count(1):
            if not left or over.wait(_WELCOMES.wait(asked) / 1e9):
                return
            left -= {rank for rank in left if ask(rank)}

    here = {rank for rank, well in ask_each(job.peers, ask, "tailbound-welcome").items() if well}
    left = set(job.peers) - here
    if left:
        engine.ask(lambda: [engine.suspect(rank) for rank in left])
        reliable.before_close(over.set)
        reliable.runs(partial(ask_again, left), "tailbound-welcome")
    return here
