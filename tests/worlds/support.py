"""What tests of whole jobs share: a store in memory, teams of communicators in one process, and trouble for packets.

A team is N communicators over the udp datapath on loopback, one thread each, as N processes would be.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import random
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import reference
from tailbound.codec.hashing import seed_of
from tailbound.codec.scale import weights_of
from tailbound.codec.shape import shape_for
from tailbound.collective.communicator import Communicator
from tailbound.collective.op import Outcome
from tailbound.collective.transpose import Transpose
from tailbound.prepare import MemoryStore as MemoryStore
from tailbound.transport import rendezvous
from tailbound.transport.config import Config
from tailbound.transport.reliable import Reliable
from tailbound.transport.rendezvous import Greeting
from tailbound.transport.sockets import Socket
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import MISSING, PacketType
from tailbound_lab.simulate.messages import read

T = TypeVar("T")
MS = 1_000_000
#: Seconds that anything may take on a loaded machine before a test gives up on it.
PATIENCE = 60.0
_TYPE_AT = HEADER_DTYPE.fields["type"][1]


@dataclass
class Trouble:
    """Drops and doubles the packets that one sender hands to the kernel; seeded, counted.

    Attributes:
        loss, duplicate: probability per packet.
        types: packet types that are troubled; None: all.
        to: ranks whose packets are troubled; None: all.
    """

    seed: int
    loss: float = 0.0
    duplicate: float = 0.0
    types: frozenset[PacketType] | None = None
    to: frozenset[int] | None = None
    dropped: dict[tuple[int, int], int] = field(default_factory=dict)  # (rank, type): packets

    def begin(self, rank: int) -> Trouble:
        """Troubles what ``rank`` sends from now on, always alike."""
        self._random = random.Random(f"{self.seed}/{rank}")
        return self

    def attach(self, communicator: Communicator) -> Trouble:
        """Puts itself between the communicator and the sockets that it sends over."""
        self._engine, sender = communicator._engine, communicator.job.sender
        self.begin(communicator.config.rank)
        ranks = {target: rank for rank, target in sender.peers.items()}
        self._untroubled = sender.sockets.copy()
        self._put([Troubled(sock, self, ranks) for sock in self._untroubled])
        return self

    def detach(self) -> None:
        """From now on packets are let alone."""
        self._put(self._untroubled)

    def _put(self, sockets: Sequence[Socket]) -> None:
        """In a turn, after which the library knows of it."""
        self._engine.ask(lambda: operator.setitem(self._engine.job.sender.sockets, slice(None), sockets))

    def meet(self, rank: int, packets: list[bytes]) -> list[bytes]:
        out = []
        for packet in packets:
            kind = PacketType(packet[_TYPE_AT])
            if (self.types is not None and kind not in self.types) or (self.to is not None and rank not in self.to):
                out.append(packet)
                continue
            if self._random.random() < self.loss:
                self.dropped[rank, kind] = self.dropped.get((rank, kind), 0) + 1
                continue
            out.append(packet)
            if self._random.random() < self.duplicate:
                out.append(packet)
        return out


class Troubled:
    """A ``transport.sockets.Socket`` that sends over another one what ``trouble`` leaves of the packets.

    They leave one by one, since those of a burst may differ in length now; for room they wait.
    """

    def __init__(self, inner: Socket, trouble: Trouble, ranks: dict[tuple[str, int], int]) -> None:
        self._inner, self._trouble, self._ranks = inner, trouble, ranks
        self._room = select.poll()
        self._room.register(inner, select.POLLOUT)

    def fileno(self) -> int:
        return self._inner.fileno()

    def room(self) -> int:
        return self._inner.room()

    def send_one(self, packet: bytes, target: tuple[str, int], stride: int = 0) -> int:
        length = stride or len(packet)
        return self._send(target, [packet[at : at + length] for at in range(0, len(packet), length)])

    def send_many(self, messages: int, count: int) -> tuple[int, int]:
        for done, message in enumerate(read(messages, count)):
            if number := self._send(message.target, message.packets):
                return (done, 0) if done else (0, number)
        return count, 0

    def _send(self, target: tuple[str, int], packets: list[bytes]) -> int:
        for packet in self._trouble.meet(self._ranks.get(target, -1), packets):
            while number := self._inner.send_one(packet, target):
                if number != errno.EAGAIN:
                    return number
                self._room.poll()
        return 0


def launch(communicator: Communicator, data: Any, out: Any, bucket: int = 0, **more: Any) -> Future[Outcome]:
    """``communicator.launch`` of what is by default the only bucket of its step; what becomes of it."""
    done = Future[Outcome]()
    communicator.launch(bucket, data, out, **{"last": True} | more, done=done.set_result)
    return done


class Team:
    """Communicators of one job, and a way to let all of them do the same at once; in virtual time ``sim.team``."""

    def __init__(self, communicators: Sequence[Communicator]) -> None:
        self.communicators = list(communicators)
        self._threads = ThreadPoolExecutor(max(1, len(communicators)))

    def __getitem__(self, rank: int) -> Communicator:
        return self.communicators[rank]

    def __len__(self) -> int:
        return len(self.communicators)

    def engine(self, rank: int) -> Transpose:
        """The transport thread of ``rank``: tests ask it through this alone."""
        return self[rank]._engine

    def each(self, function: Callable[[Communicator], T], ranks: Sequence[int] | None = None) -> list[T]:
        """``function(communicator)`` in a thread per rank, at the same time; the results in rank order."""
        chosen = range(len(self)) if ranks is None else ranks
        futures = [self._threads.submit(function, self[rank]) for rank in chosen]
        return [future.result(PATIENCE) for future in futures]

    def allreduce(
        self, inputs: Sequence[NDArray[np.float32]], ranks: Sequence[int] | None = None
    ) -> list[tuple[NDArray[np.float32], Outcome]]:
        """One all-reduce of ``inputs[rank]`` by ``ranks``; (average, outcome) of each."""

        def one(communicator: Communicator) -> tuple[NDArray[np.float32], Outcome]:
            data = inputs[communicator.config.rank]
            out = np.full_like(data, np.nan)
            return out, communicator.allreduce(data, out).result(PATIENCE)

        return self.each(one, ranks)

    def averaged(self, numel: int, seed: int, *how: Any, **named: Any) -> tuple[list[NDArray[np.float32]], list[Any]]:
        """One all-reduce of gradients that ``seed`` draws, ``how`` as for ``allreduce``: inputs and results."""
        inputs = gradients("U", len(self), numel, seed=seed)
        return inputs, self.allreduce(inputs, *how, **named)

    def close(self) -> None:
        self.each(lambda c: c.close())
        self._threads.shutdown()


def patient(**settings: Any) -> dict[str, Any]:
    """Settings with which a loaded machine loses nothing: deadlines of seconds, rows of 256 codes, a small ring.

    The bound of an op is half of ``PATIENCE``, so that what goes wrong is told by its outcome.
    """
    late = dict.fromkeys(("deadline_1", "deadline_2", "stage_max", "start_max"), 10_000 * MS)
    return {"width": 256, "ring_mib": 4.0, "quiet": 2_000 * MS} | late | settings


def hasty(**settings: Any) -> dict[str, Any]:
    """Settings for jobs in which something is missing: every stage is over soon."""
    soon = {"deadline_1": 400, "deadline_2": 400, "stage_max": 1000, "start_max": 600, "quiet": 5}
    return patient(**{name: ms * MS for name, ms in soon.items()} | settings)


def await_that(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Returns when ``condition()`` is true; looks again every millisecond.

    Raises:
        AssertionError: it is not after ``seconds``; with ``what`` was awaited.
    """
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"after {seconds:g} s there was still not: {what}"
        time.sleep(0.001)


def is_renewed(one: Reliable, times: int) -> bool:
    """Whether its connections were made anew so often; else ends its newest one, as if the other end had closed it.

    The other end makes one, too, which may become the newest at any time.
    """
    lines = one._lifelines
    if lines.renewed >= times and not lines._due:
        return True
    for line in list(lines._newest.values()):
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RD)
    return False


@contextmanager
def assembled(makers: Sequence[Callable[[], Communicator]], cookie: int | None = None) -> Iterator[Team]:
    """Calls all ``makers`` at once, since a communicator waits for its peers, and closes what they made.

    ``cookie`` makes all random choices of the codec repeatable.
    """
    original = rendezvous.new_cookie
    if cookie is not None:
        rendezvous.new_cookie = lambda: cookie
    try:
        with ThreadPoolExecutor(len(makers)) as threads:
            members: list[Future[Communicator]] = [threads.submit(make) for make in makers]
    finally:
        rendezvous.new_cookie = original
    whole = Team([member.result() for member in members if member.exception() is None])
    try:
        for member in members:
            member.result()  # one that could not be made: the others are closed like after any test
        yield whole
    finally:
        whole.close()


@contextmanager
def team(
    ranks: int, settings: dict[str, Any], *, name: str = "job", store: MemoryStore | None = None,
    cookie: int | None = None, datapath: str = "udp", interface: str | None = None,
    within: Callable[[int, Callable[[], Communicator]], Communicator] = lambda rank, make: make(),
) -> Iterator[Team]:  # fmt: skip
    """A job of ``ranks`` communicators in this process, by default over udp on loopback.

    ``within`` makes that of a rank where it lives, which may be another network namespace.
    """
    shared = store or MemoryStore()

    def maker(rank: int) -> Callable[[], Communicator]:
        config = Config(**({"rank": rank, "ranks": ranks} | settings))
        given = {"datapath": datapath, "interface": interface, "name": name}
        return lambda: within(rank, lambda: Communicator(shared, config, **given))

    with assembled([maker(rank) for rank in range(ranks)], cookie) as whole:
        yield whole


def greeting(rank: int, **fields: Any) -> Greeting:
    """What ``rank`` of three, or as ``fields`` have it, says of itself at the start."""
    usual = Greeting(
        rank=rank, ranks=3, version="0.1.0", address=f"10.0.0.{rank}", port=5515, width=1408, rows=64,
        sum_rows=64, datapath="udp", model="abc", options={}, cookie=7 if rank == 0 else 0,
    )  # fmt: skip
    return replace(usual, **fields)


def gradients(kind: str, ranks: int, numel: int, seed: int) -> list[NDArray[np.float32]]:
    """Inputs of the table of codec-17: ``U`` independent, ``C`` correlation 0.5, ``I`` identical; f32[numel] each."""
    make = _gradients if ranks * numel <= _KEPT else _gradients.__wrapped__
    return [each.copy() for each in make(kind, ranks, numel, seed)]


#: Entries of inputs that are kept for the next test; drawing them takes three times as long as averaging them.
_KEPT = 4 << 20


@functools.lru_cache(maxsize=16)
def _gradients(kind: str, ranks: int, numel: int, seed: int) -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(numel)
    if kind == "I":
        return [common.astype(np.float32)] * ranks
    share = {"U": 0.0, "C": 0.5}[kind]
    own = (rng.standard_normal(numel) for _ in range(ranks))
    return [(np.sqrt(share) * common + np.sqrt(1 - share) * each if share else each).astype(np.float32) for each in own]


def exact_mean(inputs: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """The mean in float64."""
    total = np.zeros(inputs[0].shape)
    for each in inputs:
        total += each
    return total / len(inputs)


def nmse(value: NDArray[Any], exact: NDArray[np.float64]) -> float:
    """Squared error over squared length; 0 where both are zero."""
    length, off = float(np.vdot(exact, exact)), value.astype(np.float64) - exact
    error = float(np.vdot(off, off))
    return error / length if length else error


def alike(results: Sequence[tuple[NDArray[np.float32], Outcome]]) -> None:
    """All ranks have the same bits."""
    for out, _ in results:
        np.testing.assert_array_equal(out.view(np.uint32), results[0][0].view(np.uint32))


def whole(
    results: Sequence[tuple[NDArray[np.float32], Outcome]],
    inputs: Sequence[NDArray[np.float32]] = (),
    most: float = 2e-3,
) -> None:
    """Nothing is missing, and all ranks have the same bits: the mean of ``inputs``, if given, but for so much."""
    for _, outcome in results:
        assert (outcome.delivered, outcome.error, outcome.missing) == (outcome.expected, None, set())
    alike(results)
    assert not inputs or nmse(results[0][0], exact_mean(inputs)) <= most


def balanced(entry: Mapping[str, int]) -> bool:
    """Whether the rows of an entry of ``observe.ledger`` add up, none of them negative."""
    missing = sum(entry[fate] for fate in MISSING)
    adds_up = entry["expected"] == entry["taken"] + entry["missing"] and entry["missing"] == missing
    return adds_up and min(entry.values()) >= 0


@dataclass
class Reference:
    """An all-reduce without loss in plain numpy: what every datapath must give, bit by bit."""

    ranks: int
    width: int
    cookie: int
    tensors: tuple[int, ...] = ()

    def allreduce(self, inputs: Sequence[NDArray[np.float32]], label: int) -> NDArray[np.float32]:
        """The average of ``inputs`` (f32[n] by rank; all finite) in the op ``label``, in whatever order rows come."""
        shape = shape_for(inputs[0].size, self.width, 8, self.tensors)
        seed, weights = seed_of(self.cookie, label), weights_of(self.ranks)
        coded = [reference.encode(x, shape, seed, weights.cap) for x in inputs]
        codes = np.zeros((shape.rows, shape.codes), np.uint8)
        scale = np.zeros(shape.rows, np.float32)
        there = np.diff(shape.layout.entries)
        for k in range(shape.rows):
            g, total = int(shape.layout.of[k]), None
            for c in coded:
                e, weight = int(c.exponents[g]), int(c.weights[g])
                assert total is None or total.exponent <= e, (
                    "give inputs of about one size: else the order of rows counts"
                )
                total = reference.added(total, c.payload[k], e, weight, weights)
            assert total is not None
            codes[k], scale[k] = reference.mean(total, k, seed, there=int(there[g]))
        return reference.decode(codes, scale, np.ones(shape.rows, bool), shape, seed)
