"""Processes that end, and ranks that join a job under way: one that has died (clock-32), one that was lost (clock-20).

Every rank keeps a connection to each other that says nothing. Its end tells of a death (``transport.lifeline``), so a
rank that is killed costs the others the op under way at most, and not a deadline in each of three (clock-14). An end
alone proves nothing, since middleboxes make some, too. ``reliable`` makes the connection anew. Who takes it lives, even
where it is stopped, since its kernel takes connections for it. Where it is refused nobody listens, or a firewall says
so: the rank is asked over UDP. Without an answer its process has ended. Where a host loses power nothing is refused:
its ranks are suspected after three ops.

A rank that has died comes back as a new process at its old address and ports. It finds in the store that the job has
begun, and asks the others what part they have in it. Where all of them are new processes, too, the job begins anew, at
step 0 and with another cookie. Else it stays *outside* until it enters between two steps of a live rank, the donor,
which holds meanwhile: in the steps to come nothing is missing here, and no rank waits for more than the transfer. All
others are asked to take the rank in again, and from then on wait for it as for any other.

A rank that was away for longer than the ring lasts cannot count the rows it has missed: it asks one rank where to join,
never all. Either is told an ``Entrance``. Old scales stay until the first results bring those of the others.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tailbound.collective.job import log
from tailbound.collective.transpose import Transpose
from tailbound.errors import TransportError
from tailbound.transport.agreement import OPEN, Message, decode_map, encode_map
from tailbound.transport.backoff import Policy
from tailbound.transport.config import MS
from tailbound.transport.reliable import Handler, Refusal, Reliable
from tailbound.transport.sequence import Position
from tailbound.transport.steps import STEP_MASK, step_of
from tailbound.wire.schema import serial_distance

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Names of the requests on the reliable path: what part a rank has, to take one in, and where to join.
PART, WELCOME, POSITION = "part", "welcome", "position"
#: Of a welcome: who comes back, and the step that it begins with; of its answer: the present stamp of who answers, and
#: the newest that it knows of who comes back, 0 without a key. Of an answer about the part: that, a cookie, turns of
#: keys, and the next step.
_WELCOME, _STAMPS, _LIFE = struct.Struct("!HI"), struct.Struct("!QQ"), struct.Struct("!BIHI")
#: Seconds for a peer's engine to answer, and for the peer to; between two questions.
_ENGINE, _PEER, _AGAIN = 2.0, 3.0, 0.2
#: How a peer that has not taken this rank in is asked again.
_WELCOMES = Policy(200 * MS, 10_000 * MS)
_POSITION_MOST = 1 << 16
#: Seconds that a peer has to take a connection at least, and all of them have at most.
_KEEP, _ALL = 3.0, 30.0
#: Questions over UDP to a rank that refuses connections, and seconds for the answer to each.
_ASKED, _ASK = 2, 0.015


T = TypeVar("T")
#: Peers that are asked at the same time, at most, each by a thread.
AT_ONCE = 64


def of_form(form: struct.Struct, answer: Callable[..., Iterable[Buffer]]) -> Handler:
    """A handler for ``Reliable.serve``: ``answer`` gets the fields of a request, one of another size is refused."""

    def handler(request: bytes) -> Iterable[Buffer]:
        if len(request) != form.size:
            raise Refusal(f"a request of {len(request)} bytes")
        return answer(*form.unpack(request))

    return handler


def ask_each(
    ranks: Collection[int], ask: Callable[[int], T | None], name: str, ends: Callable[[T], bool] = lambda _: False
) -> dict[int, T]:
    """What ``ask`` gives for each of ``ranks``, all at the same time; who gives None or cannot be asked is left out.

    Args:
        ranks: of peers.
        ask: asks one of them; may raise a ``TransportError``.
        name: of the threads.
        ends: an answer after which the others are not waited for.
    """
    threads, found = ThreadPoolExecutor(max(1, min(len(ranks), AT_ONCE)), name), dict[int, T]()
    asked = {threads.submit(ask, rank): rank for rank in ranks}
    for future in as_completed(asked):
        with contextlib.suppress(TransportError):
            if (answer := future.result()) is not None:
                found[asked[future]] = answer
                if ends(answer):
                    break
    threads.shutdown(wait=False, cancel_futures=True)
    return found


class Part(enum.IntEnum):
    """What part a process has in the job."""

    UNKNOWN = 0  #: it is new, and has not found out yet
    OUTSIDE = 1  #: the job is under way, and this process is new in it
    BEGINS = 2  #: all processes are new
    INSIDE = 3  #: it has made steps with the others


class Entrance(NamedTuple):
    """Where a job goes on.

    Attributes:
        position: of the next step.
        cookie: of the job.
        away: ranks that have said goodbye, or whose processes have ended (clock-38).
        dead: suspects that are silent, too (clock-15).
    """

    position: Position
    cookie: int
    away: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()


def entrance(engine: Transpose) -> Entrance:
    """Where the next step of this rank begins; for ``Transpose.call``, between two steps."""
    job, members = engine.job, engine.job.membership
    dead = members.dead(step_of(job.sequence.upcoming))
    return Entrance(job.sequence.position(), job.cookie, frozenset(members.gone | members.ended), frozenset(dead))


def encode(found: Entrance, ranks: int) -> bytes:
    """An entrance as bytes; ``ranks`` can own rows."""
    at = found.position
    maps = encode_map(Message(0, at.agreed), ranks).hex()
    return json.dumps([at.step, at.result_seq, at.sum_seqs, maps, found.cookie, *map(sorted, found[2:])]).encode()


def decode(data: bytes, ranks: int) -> Entrance:
    """The entrance in ``data``, for a job in which ``ranks`` can own rows.

    Raises:
        TransportError: it is none.
    """
    try:
        step, result_seq, sums, maps, cookie, away, dead = json.loads(data)
        agreed = decode_map(bytes.fromhex(maps), ranks)
        position = Position(
            int(step), int(result_seq), tuple(map(int, sums)), agreed.maps if agreed is not None else ()
        )
        found = Entrance(position, int(cookie), frozenset(map(int, away)), frozenset(map(int, dead)))
        in_range = all(0 <= n < 1 << 32 for n in (position.result_seq, *position.sum_seqs, found.cookie))
        in_range = in_range and 0 <= position.step <= STEP_MASK and found.away | found.dead <= set(range(ranks))
        settled = position.agreed and position.agreed[-1].since != OPEN
        if not (in_range and settled and len(position.sum_seqs) == ranks):
            raise ValueError("numbers out of range")
        return found
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise TransportError(
            f"the answer is no entrance ({error}): run the same version of Tailbound on all ranks"
        ) from error


class Life(NamedTuple):
    """What a process says of itself: its part, and the cookie that its packets have, or that it proposes."""

    part: Part
    cookie: int
    turns: int = 0  #: of keys, where it has one
    step: int = 0  #: its next one, if it is inside: marks of a process that comes back begin there, and not far ahead


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
            part, *more = _LIFE.unpack(pull(peer, PART, b"", _PEER, _LIFE.size))
            return Life(Part(part), *more)
        except (struct.error, ValueError):
            return None

    while True:
        lives = {rank: Life(Part.UNKNOWN, cookie)}
        lives |= ask_each(asked, ask, "tailbound-part", lambda life: life.part == Part.INSIDE)
        for life in lives.values():
            if life.part == Part.INSIDE:
                return life._replace(part=Part.OUTSIDE)
        silent = [peer for peer in asked if peer not in lives]
        if not silent:
            # the lowest again, last: its process is the least likely to be another one when it counts
            lives |= ask_each(asked[:1], ask, "tailbound-part")
            begun = [life.cookie for life in lives.values() if life.part == Part.BEGINS]
            new = [lives[each].cookie for each in sorted(lives) if lives[each].part == Part.UNKNOWN]
            return Life(Part.BEGINS, (begun or new)[0])
        if time.monotonic() >= until:
            raise TransportError(
                f"this process has come back, and of the job's other ranks {silent} do not answer within "
                f"{timeout:g} s, while no rank is left that could give its state: restart all ranks from a checkpoint"
            )
        time.sleep(_AGAIN)


def serve(reliable: Reliable, engine: Transpose) -> None:
    """Takes ranks in again that say that they are back, and answers those that ask where to join."""

    def answer(rank: int, step: int) -> list[bytes]:
        if rank not in engine.job.membership.peers:
            raise Refusal(f"rank {rank} is none of this job's other ranks")
        try:
            stamps = engine.ask(lambda: engine.welcome(rank, step), _ENGINE)
        except TransportError as error:
            raise Refusal(f"cannot take rank {rank} in: {error}") from error
        return [_STAMPS.pack(*stamps)]

    def position(_: bytes) -> list[bytes]:
        try:
            return [encode(Entrance(engine.ask(engine.position, _ENGINE), engine.job.cookie), engine.job.world)]
        except TransportError as error:
            raise Refusal(f"cannot say where to join: {error}") from error

    reliable.serve(POSITION, position)
    reliable.serve(WELCOME, of_form(_WELCOME, answer))


def ask_all(engine: Transpose, reliable: Reliable, step: int, dead: Collection[int] = ()) -> set[int]:
    """Asks all peers to take this rank in from ``step`` on. Returns who has; ``dead`` ones are not waited for.

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
            theirs, own = _STAMPS.unpack(reliable.pull(rank, WELCOME, request, _PEER, _STAMPS.size))
            engine.call(lambda: engine.welcomed(rank, theirs, own))
        except (TransportError, struct.error) as error:
            log.info("rank %d: %s", job.rank, error)
            return False
        return True

    def ask_again(left: set[int]) -> None:
        for asked in itertools.count(1):
            if not left or over.wait(_WELCOMES.wait(asked) / 1e9):
                return
            left -= {rank for rank in left if ask(rank)}

    asked = [rank for rank in job.peers if rank not in dead]
    here = {rank for rank, well in ask_each(asked, ask, "tailbound-welcome").items() if well}
    left = set(job.peers) - here
    if left:
        engine.ask(lambda: [engine.suspect(rank) for rank in left])
        reliable.before_close(over.set)
        reliable.runs(partial(ask_again, left), "tailbound-welcome")
    return here


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
            to = decode(bytes(pull(donor, POSITION, b"", _PEER, _POSITION_MOST)), job.world).position
        except TransportError as error:
            reasons.append(str(error))
            continue
        return engine.ask(partial(engine.jump, to))
    raise TransportError(
        f"rank {job.rank}: nobody said where to join: {'; '.join(reasons) or 'no live rank is left'}. Restart this rank"
    )


def watch(reliable: Reliable, engine: Transpose) -> None:
    """Tells ``engine`` of processes that die, where there were connections to them."""

    def lost(rank: int) -> bool:
        try:
            for _ in range(_ASKED):
                since = engine.ask(lambda: engine.ask_after(rank))
                time.sleep(_ASK)
                if engine.ask(partial(engine.answered, rank, since)):
                    return False
            engine.ask(lambda: engine.died(rank))
        except TransportError:  # this one has no time, and asks again, or is closing
            return False
        return True

    reliable.lost = lost


def connect(reliable: Reliable, rank: int, peers: Sequence[int], timeout: float) -> None:
    """Connects ``rank`` to ``peers`` at the start of a job, in ``timeout`` seconds or half a minute at most.

    Who cannot be reached is named in the log: nothing will tell of its death. The job goes on, since all else that
    needs TCP is rare.
    """
    until = time.monotonic() + min(timeout, _ALL)

    def reached(peer: int) -> bool:
        # patiently: to the peer the end of a connection that was given up is a death
        reliable.keep(peer, max(_KEEP, until - time.monotonic()))
        return True

    known = ask_each(peers, reached, "tailbound-connect")
    if missing := [peer for peer in peers if peer not in known]:
        log.warning(
            "rank %d: no TCP connection to rank(s) %s, so one of them that dies is waited for in three ops: "
            "let TCP pass between all hosts, on any port",
            rank,
            missing,
        )
