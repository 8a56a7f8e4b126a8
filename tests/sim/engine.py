"""Ranks of the real engine in virtual time: ``Transpose``, ``Job``, codec, send queue and the udp datapath's rules.

Replaced is what touches the machine: sockets (``_Wire``), the receiving thread (``_Datapath``), the sleeping transport
thread (``Rank``) and the clock, which moves on by a little with every look at it. Packets are taken in while a rank's
processes are stopped, as a kernel does. Not there: the thread that says HOLD while Python cannot (``_Heartbeat``),
``Communicator`` with its proof of reachability, XDP, switch, fan-out and multicast; a rank that is lost asks another
engine, not the reliable path.

What must hold is checked after every turn and every op (``Rank.check``, ``World.finished``):

- acknowledgements of a peer never go back (clock-7b);
- what a rank has let go it has acknowledged: nobody waits for a rank that has forgotten an op (clock-19);
- an op ends within D_start and twice ``stage_max``, and the turns of the engine in which it becomes due and ends
  (clock-12);
- results are written, and who has lost nothing of an op has the bits of the others who have not;
- every packet that arrived has one verdict in the ledger (kernel-21).
"""

from __future__ import annotations

import errno
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from messages import read
from sim.fabric import MS, US, Burst, Fabric, Terms
from tailbound.codec.shape import layout_tag, shape_for
from tailbound.collective.job import Job
from tailbound.collective.op import Launch, Op, Outcome
from tailbound.collective.tally import rows_by_rank
from tailbound.collective.transpose import Transpose
from tailbound.datapath.ingest import ingest
from tailbound.datapath.protocol import EventRecord, Store
from tailbound.datapath.store import allocate, store_of
from tailbound.datapath.tables import Tables
from tailbound.errors import TailboundError, TransportError
from tailbound.transport.config import Config
from tailbound.transport.pace import Limits, Pacer
from tailbound.transport.sender import Sender
from tailbound.transport.sequence import Layout
from tailbound.transport.sockets import UdpSocket
from tailbound.transport.steps import step_of
from tailbound.wire.schema import OP_INDEX_BITS, Verdict, serial_distance

PORT = 5515
COOKIE = 0x5EED
_EVENTS, _CONTROLS = 1001, 1002


def address(rank: int) -> str:
    """Of a simulated rank: one that no host has (RFC 5737), since a job asks for the speed of its own interface."""
    return f"192.0.2.{1 + rank}"


def _word(rank: int) -> int:
    return int.from_bytes(socket.inet_aton(address(rank)), "little")


class _Datapath:
    """The udp datapath's tables without its socket and thread (``datapath.protocol.Datapath``)."""

    name = "udp"
    gap = 0
    lost_on_arrival: ClassVar[dict[str, int]] = {}

    def __init__(self, rank: int, width: int, rows: int, result_rows: int, wire: _Wire) -> None:
        self.tables = Tables(allocate(width, rows, result_rows))
        self.store: Store = store_of(self.tables.arrays)
        self.endpoint = address(rank), PORT
        self.socket = cast(UdpSocket, wire)
        self.taken = 0
        self._echoes = np.zeros((64, 2), np.int64)

    def feed(self, burst: Burst, now: int) -> list[bytes]:
        """Takes in what has arrived; the echoes to send back."""
        buffer = np.zeros(max(8, -(-len(burst.data) // 8) * 8), np.uint8)
        buffer[: len(burst.data)] = np.frombuffer(burst.data, np.uint8)
        segment = burst.stride if len(burst.data) > burst.stride else 0
        arguments = (buffer, len(burst.data), segment, _word(burst.source), now, self._echoes)
        echoes = self._echoes[: ingest(self.tables.context, *arguments)].tolist()
        self.taken += len(burst.packets())
        return [buffer[at : at + length].tobytes() for at, length in echoes]

    def reset(self, first_op: int) -> None:
        self.tables.seal((first_op - 1) & 0xFFFFFFFF, 0, self.store.sum_rows)

    def seal(self, op: int, seq: int, rows: int) -> None:
        self.tables.seal(op, seq, rows)

    def fds(self) -> tuple[int, int]:
        return _EVENTS, _CONTROLS

    def events(self) -> list[EventRecord]:
        return [EventRecord(*entry) for entry in self.tables.take_events()]

    def control_packets(self) -> list[bytes]:
        return self.tables.take_controls()

    def sending(self, peers: int, ports: int = 0) -> list[UdpSocket]:
        return [self.socket]

    def fence(self) -> None:
        return None

    def close(self) -> None:
        return None


class _Wire:
    """A rank's socket (``transport.sockets.Socket``): what is sent goes to the fabric, as long as there is room."""

    def __init__(self, rank: int, fabric: Fabric) -> None:
        self._rank, self._fabric = rank, fabric
        #: (to whom, packets) -> what of them leaves
        self.trouble: Callable[[int, list[bytes]], list[bytes]] | None = None

    def fileno(self) -> int:
        return -1

    def send_one(self, packet: bytes, target: tuple[str, int]) -> int:
        if not self._fabric.has_room(self._rank):
            return errno.EAGAIN
        self._send(target[0], packet, len(packet))
        return 0

    def send_many(self, messages: int, count: int) -> tuple[int, int]:
        for i, message in enumerate(read(messages, count)):
            if not self._fabric.has_room(self._rank):
                return (i, 0) if i else (0, errno.EAGAIN)
            self._send(message.target[0], message.data, message.stride)
        return count, 0

    def _send(self, host: str, data: bytes, stride: int) -> None:
        burst = Burst(self._rank, int(host.rpartition(".")[2]) - 1, data, stride)
        if self.trouble is None:
            self._fabric.send(burst)
            return
        kept = self.trouble(burst.to, burst.packets())
        alike = [packet for packet in kept if len(packet) == stride]
        rest = [packet for packet in kept if len(packet) != stride]
        for packets, length in ((alike, stride), *(([packet], len(packet)) for packet in rest)):
            if packets:
                self._fabric.send(Burst(self._rank, burst.to, b"".join(packets), length))


class _Ready:
    """For ``transport.wait.Waiter``: everything may be read at any time, and it is empty if nothing came."""

    def readable(self, fd: int) -> bool:
        return fd >= 0


class _Heartbeat:
    """For ``heartbeat.Heartbeat``: no thread; nothing is repeated."""

    def __init__(self, peers: int) -> None:
        self._peers = peers

    def said(self, packets: list[bytes], now: int) -> None:
        return None

    def repeated(self) -> list[int]:
        return [0] * self._peers

    def stop(self) -> None:
        return None


class _Engine(Transpose):
    """The real engine without its thread.

    Attributes:
        ended: by the label of an op, rows of each rank that have not come, contributions and results, and whether one
            of its halves ended by quiet.
    """

    ended: dict[int, tuple[Counter[int], bool]]

    def begin(self) -> None:
        """In place of ``start``."""
        self.ended = {}
        self._event_fd, self._control_fd = self.job.datapath.fds()
        self._group_fd = -1
        self._waiter = cast(Any, _Ready())
        self._holding._heartbeat.stop()
        self._holding._heartbeat = cast(Any, _Heartbeat(len(self.job.peers)))

    def end(self) -> None:
        """In place of ``close``."""
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
            self.job.lanes.close()

    def _poke(self) -> None:
        return None

    @property
    def idle(self) -> bool:
        """Whether no op is in the engine."""
        return not (self._new or self._window.waiting or self._ops)

    def rest(self, on: bool) -> None:
        """In place of ``hold``."""
        (self._holding.begin if on else self._holding.resume)()

    def _deliver(self, op: Op) -> None:
        """Notes, before anything of the op is let go, which rows of whom have not come."""
        if op.launch is not None and not op.delivered:
            self.ended[op.label] = self._missing_of(op), op.early
        super()._deliver(op)

    def _missing_of(self, op: Op) -> Counter[int]:
        job, placement = self.job, op.place.placement
        missing: Counter[int] = Counter()
        own = int(placement.counts[job.rank])
        summed = np.zeros(job.ranks, np.int64)
        rows_by_rank(job.slots, op.place.sum_seqs[job.rank], own, job.sum_mask, job.cookie, op.label, summed)
        lost = placement.owner[op.buffers.source == -1]
        for peer in job.peers:
            missing[peer] = own - int(summed[peer]) + int((lost == peer).sum())
        return missing

    def turn(self, now: int) -> tuple[int, int]:
        """One turn; the latest time of the next, and when to wake up first."""
        return self._next_wake(self._turn(now), now)

    def look_out(self, now: int, end: int) -> int:
        """Woke up without anything to read; when to wake up next (0: for a turn)."""
        return self._look_out(now, end)


@dataclass
class Done:
    """A finished op of one rank."""

    label: int
    outcome: Outcome
    out: NDArray[np.float32]
    launched: int
    finished: int
    missing_of: Counter[int]  #: rows, by rank
    early: bool  #: a half ended by quiet
    deadline: int  #: D1 that the rank advertises

    @property
    def expected(self) -> int:
        """Rows, as ``Outcome.expected``."""
        return self.outcome.expected

    @property
    def complete(self) -> bool:
        """Whether both halves ended because nothing was missing."""
        return not (self.early or self.outcome.deadline_hits)

    @property
    def took(self) -> int:
        """From launch to end, ns."""
        return self.finished - self.launched

    @property
    def step(self) -> int:
        """Step that it belongs to."""
        return step_of(self.label)


@dataclass
class Plan:
    """What every rank trains: sizes of its buckets in entries, and how long forward and backward take, in ns."""

    buckets: tuple[int, ...] = (64 * 256, 64 * 64)
    compute: int = 8 * MS
    gap: int = 2 * MS
    spread: float = 0.2


@dataclass
class Rank:
    """One rank: its engine, what has come of its ops, and its training thread."""

    world: World
    rank: int
    engine: _Engine
    datapath: _Datapath
    step: int = 0
    over: list[Done] = field(default_factory=list)
    stopped: int = 0  #: until when its processes do not run, ns
    longest: int = 0  #: turn of the engine, ns
    stops: list[tuple[int, int]] = field(default_factory=list)  #: from when to when its processes did not run, ns
    dead: bool = False
    _waiting: int = 0
    _behind: bool = False
    _end: int = 0
    _busy: int = 0
    _number: int = 0
    _marks: dict[tuple[int, str], int] = field(default_factory=dict)

    # -- the transport thread -----------------------------------------------------------------------------------------

    def poke(self) -> None:
        """Something came for the transport thread: it takes a turn as soon as it runs."""
        self._schedule(self.world.fabric.now, turn=True)

    def _schedule(self, when: int, *, turn: bool) -> None:
        fabric = self.world.fabric
        when = max(when, self._busy, self.stopped)
        self._number += 1
        number = self._number
        fabric.at(when, lambda: self._run(number, turn=turn))

    def _run(self, number: int, *, turn: bool) -> None:
        if number != self._number or self.dead:
            return  # woken up by something else in the meantime
        now = self.world.fabric.now
        if now < max(self._busy, self.stopped):
            self._schedule(now, turn=turn)
            return
        if waits := self.world.waits_for_a_core():
            self._busy = now + waits
            self._schedule(now, turn=turn)
            return
        if not turn:
            wake = self.engine.look_out(now, self._end)
            if wake:
                self._schedule(wake, turn=False)
                return
        self._end, wake = self.engine.turn(now)
        self.check()
        self._busy = self.world.fabric.clock
        self.longest = max(self.longest, self.world.fabric.spent)
        if self.engine.job.queue.full:
            wake = min(wake, now + 200 * US)  # room in the socket wakes it up
            self._end = min(self._end, wake)
        self._schedule(wake, turn=False)

    # -- the training thread ------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Begins the next step, unless the training is over; a rank that is lost joins the others first."""
        world = self.world
        if self.engine.standing().lost or self.engine.job.sequence.adrift:
            self.step = min(world.steps, self.step + self._join())
        if self.step >= world.steps or self.dead:
            return
        if pause := world.before_step(self):
            self.engine.rest(True)
            self.poke()
            world.fabric.at(world.fabric.now + pause, self._compute)
            return
        self._compute()

    def _compute(self) -> None:
        """Forward and backward pass."""
        if self.dead:
            return
        if self.engine._holding.again:
            self.engine.rest(False)
            self.poke()
        world = self.world
        when = max(world.fabric.now, self.stopped)
        # the others are through with this step: it is applied without computing it (clock-20)
        self._behind = self.engine.standing().behind > 0
        if not self._behind:
            when += world.compute_of(self)
        buckets = world.buckets_of(self)
        self._waiting = len(buckets)
        for bucket, numel in buckets:
            world.fabric.at(when, self._launching(self.step, bucket, numel, last=bucket == buckets[-1][0]))
            when += 0 if self._behind else world.vary(world.plan.gap)

    def _join(self) -> int:
        """Leaves behind what cannot be had any more (``collective.jump``, without its requests); the steps skipped."""
        job, others = self.engine.job, self.world.nodes
        for donor in sorted(job.waited_for, key=lambda rank: -others[rank].step):
            if others[donor].dead:
                continue
            try:
                return self.engine.jump(others[donor].engine.position())
            except TransportError:
                continue
        return 0

    def _launching(self, step: int, bucket: int, numel: int, *, last: bool) -> Callable[[], None]:
        def launch() -> None:
            fabric = self.world.fabric
            if self.dead:
                return
            if fabric.now < self.stopped:
                fabric.at(self.stopped, launch)
                return
            self._launch(step, bucket, numel, last=last)

        return launch

    def _launch(self, step: int, bucket: int, numel: int, *, last: bool) -> None:
        world = self.world
        data = world.gradient(self.rank, step, bucket, numel)
        out = np.full(numel, np.nan, np.float32)
        launched = world.fabric.clock
        shape = shape_for(numel, world.width, 8)
        tag = layout_tag(
            bucket=bucket, numel=numel, dtype="float32", chunk=0, world_size=world.ranks, width=world.width, mode=0
        )

        def done(outcome: Outcome) -> None:
            try:
                ended, deadline = self.engine.ended[outcome.label], self.engine.job.deadlines.advertised
                self.done(Done(outcome.label, outcome, out, launched, world.fabric.clock, *ended, deadline))
            except BaseException as error:  # the engine would log it and go on
                world.error = world.error or error

        try:
            layout = Layout((bucket, numel, 0, 0), shape, tag, last)
            self.engine.launch(Launch(layout, data, out, done, launched, contribute=not self._behind))
        except TailboundError as error:  # its training ends
            world.failed(self.rank, error)
            self.dead = True
        self.poke()

    def done(self, done: Done) -> None:
        """An op is over."""
        if done.outcome.error is not None:
            self.world.failed(self.rank, done.outcome.error)
        self.over.append(done)
        self.world.finished(self.rank, done)
        self._waiting -= 1
        if self._waiting == 0:
            self.step += 1
            self.world.fabric.at(self.world.fabric.now, self.train)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After every turn: acknowledgements never go back, and what is let go has been acknowledged."""
        job = self.engine.job
        states = job.store.peer_states
        for peer in job.peers:
            if states[peer]["cookie"] != job.cookie:
                continue
            for name in ("contributed", "published"):
                now = int(states[peer][name])
                before = self._marks.setdefault((peer, name), now)
                assert serial_distance(now, before) >= 0, f"rank {self.rank}: {name} of rank {peer} went back"
                self._marks[peer, name] = now
        released = int(job.store.control["released"][0])
        for name in ("contributed", "published"):
            own = int(getattr(job.marks, name))
            assert serial_distance(own, released) >= 0, f"rank {self.rank} let {released} go and said {name} {own}"

    def check_books(self) -> None:
        """Every packet that arrived has one verdict."""
        ledger = self.engine.job.store.ledger["verdict"]
        verdicts = int(ledger.sum()) - int(ledger[..., Verdict.ABANDONED].sum())
        assert verdicts == self.datapath.taken, f"rank {self.rank}: {verdicts} verdicts, {self.datapath.taken} came"


class World:
    """A job of ``ranks`` in virtual time.

    Args:
        ranks: how many.
        seed: of everything.
        terms: of the network.
        plan: of the training.
        steps: of the training.
        paced: bytes per second towards every peer that pacing begins with; 0: no limit.
        limits: of pacing, for networks that are smaller than real ones; None: as they are.
        width: entries of a row.
        rows: of the rings of sums and results.
        settings: of ``transport.config.Config``.
    """

    engine = _Engine

    def __init__(
        self,
        ranks: int = 4,
        seed: int = 1,
        terms: Terms | None = None,
        plan: Plan | None = None,
        steps: int = 30,
        paced: float = 0.0,
        limits: Limits | None = None,
        width: int = 64,
        rows: tuple[int, int] = (1024, 4096),
        **settings: Any,
    ) -> None:
        self.ranks, self.steps, self.width, self.rows = ranks, steps, width, rows
        self.plan = plan or Plan()
        self.fabric = Fabric(ranks, seed, terms)
        self.fabric.deliver = self._deliver
        self.work = self.fabric.random.choice((2, 20, 200)) * US
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._seed = seed
        self._whole: dict[int, tuple[int, bytes]] = {}  # op: who had all of it first, and its bits
        self.nodes = [self._open(rank, settings, paced, limits) for rank in range(ranks)]

    def _open(self, rank: int, settings: dict[str, Any], paced: float, limits: Limits | None) -> Rank:
        config = Config(
            rank=rank, ranks=self.ranks, width=self.width, codec_threads=1, **({"share_rows": False} | settings)
        )
        wire = _Wire(rank, self.fabric)
        datapath = _Datapath(rank, self.width, *self.rows, wire)
        peers = {(rank + i) % self.ranks: (address((rank + i) % self.ranks), PORT) for i in range(1, self.ranks)}
        job = Job(config, datapath, Sender([wire], peers), COOKIE, self._clock)
        if limits is not None:
            job.traffic.pacer = job.queue.pacer = Pacer(job.sender.peers, limits)
        if paced:
            for peer, path in job.queue.pacer.paths.items():
                path.rate = paced
                job.queue.pacer.limited.add(peer)
        job.activate([_word(r) for r in range(self.ranks)], _word(rank))
        engine = self.engine(job)
        engine.begin()
        return Rank(self, rank, engine, datapath)

    def _clock(self) -> int:
        """The engine's clock: it looks at it all the time, and works in between."""
        self.fabric.spent += self.work
        return self.fabric.clock

    # -- dice ---------------------------------------------------------------------------------------------------------

    def vary(self, mean: int) -> int:
        """A time around ``mean``, ns."""
        return max(0, int(mean * (1 + self.plan.spread * self.fabric.random.uniform(-1, 1))))

    def gradient(self, rank: int, step: int, bucket: int, numel: int) -> NDArray[np.float32]:
        """f32[numel] of one rank, the same in every run."""
        random = np.random.default_rng((self._seed, rank, step, bucket))
        return random.standard_normal(numel, np.float32)

    # -- what a case may do otherwise ----------------------------------------------------------------------------------

    def buckets_of(self, node: Rank) -> list[tuple[int, int]]:
        """(index, entries) of the buckets of the step that ``node`` begins."""
        return list(enumerate(self.plan.buckets))

    def compute_of(self, node: Rank) -> int:
        """For how long it computes before the first of them, ns."""
        return self.vary(self.plan.compute)

    def before_step(self, node: Rank) -> int:
        """For how long it holds before it computes, ns."""
        return 0

    def waits_for_a_core(self) -> int:
        """For how long a transport thread that could run does not, ns."""
        return 0

    def failed(self, rank: int, error: BaseException) -> None:
        """An op of ``rank`` has an error."""
        raise error

    # -- the course of things -----------------------------------------------------------------------------------------

    def _deliver(self, burst: Burst) -> None:
        node = self.nodes[burst.to]
        before = node.datapath.tables.state[:4].copy()
        for echo in node.datapath.feed(burst, self.fabric.now):
            self.fabric.send(Burst(burst.to, burst.source, echo, len(echo)))
        if (node.datapath.tables.state[:4] != before).any():  # events or control packets: they wake the thread up
            node.poke()

    def finished(self, rank: int, done: Done) -> None:
        """Compares an op with what others have, and its time with its bound."""
        outcome, job = done.outcome, self.nodes[rank].engine.job
        self.counts["expected"] += outcome.expected
        self.counts["delivered"] += outcome.delivered
        node, now = self.nodes[rank], self.fabric.clock
        stood = sum(max(0, min(end, now) - max(begin, now - done.took)) for begin, end in node.stops)
        bound = job.deadlines.start_max + 2 * job.config.stage_max + stood + node.longest + self.fabric.spent
        assert done.took <= bound, f"op {done.label} of rank {rank} took {done.took / MS:.0f} ms"
        assert np.isfinite(done.out).all(), f"op {done.label} of rank {rank} was not written"
        if outcome.missed or outcome.failed_groups or outcome.skipped or outcome.overwritten:
            return
        self.counts["compared"] += 1
        first = self._whole.setdefault(done.label, (rank, done.out.tobytes()))
        assert done.out.tobytes() == first[1], f"op {done.label}: ranks {first[0]} and {rank} lost nothing and differ"

    def stop(self, rank: int, at: int, length: int) -> None:
        """Stops the processes of ``rank`` ``at`` ns from now for ``length`` ns; its kernel goes on."""

        def stop() -> None:
            node, now = self.nodes[rank], self.fabric.now
            if now + length > node.stopped:
                node.stops.append((max(now, node.stopped), now + length))
                node.stopped = now + length

        self.fabric.at(self.fabric.now + at, stop)

    def kill(self, rank: int, at: int) -> None:
        """Ends the processes of ``rank`` and its kernel program, ``at`` ns from now."""

        def kill() -> None:
            self.nodes[rank].dead = self.fabric.ends[rank].cut = True

        self.fabric.at(self.fabric.now + at, kill)

    def lose(self, loss: float, burst: float = 0.0) -> None:
        """Loses this share of the packets from now on, see ``Terms``."""
        self.fabric.terms = replace(self.fabric.terms, loss=loss, burst=burst)

    def change(self, rank: int, at: int, *, speed: float | None = None, cut: bool | None = None) -> None:
        """Changes the link of ``rank`` ``at`` ns from now."""

        def change() -> None:
            end = self.fabric.ends[rank]
            end.speed = end.speed if speed is None else speed
            end.cut = end.cut if cut is None else cut

        self.fabric.at(self.fabric.now + at, change)

    def start(self) -> World:
        """All ranks begin to train."""
        for node in self.nodes:
            node.poke()
            node.train()
        return self

    def go(self, length: int) -> None:
        """Trains on for ``length`` ns."""
        end = self.fabric.now + length
        self.fabric.at(end, lambda: None)
        self._until(lambda: self.fabric.now >= end, length)

    def run(self, most: int | None = None) -> World:
        """Trains to the end; see ``finish``."""
        return self.start().finish(most)

    def finish(self, most: int | None = None) -> World:
        """Trains on to the end, and checks that everybody is at rest then; at most ``most`` ns of virtual time."""
        longest = self.nodes[0].engine.job.config.bound + self.plan.compute * 2
        left = self.steps - min(node.step for node in self.alive)
        self._until(lambda: all(n.step >= self.steps for n in self.alive), most or left * longest)
        self._until(lambda: all(n.engine.idle for n in self.alive), longest)
        for node in self.alive:
            node.check_books()
        return self

    def error_of(self, rank: int, done: Done) -> float:
        """Squared error of a result against the mean of all ranks, over the squared length of that mean."""
        bucket, size = done.label & ((1 << OP_INDEX_BITS) - 1), len(done.out)
        mean = np.mean([self.gradient(r, done.step, bucket, size) for r in range(self.ranks)], axis=0, dtype=np.float64)
        return float(((done.out - mean) ** 2).sum() / (mean**2).sum())

    def close(self) -> None:
        """Closes what the engines have opened; may be called twice."""
        for node in self.nodes:
            node.engine.end()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> list[Rank]:
        """Ranks that have not been killed."""
        return [node for node in self.nodes if not node.dead]

    def _until(self, over: Callable[[], bool], most: int) -> None:
        self.fabric.run(lambda: self.error is not None or over(), most)
        if self.error is not None:
            raise self.error

    @property
    def share(self) -> float:
        """Rows that arrived, of those expected."""
        return self.counts["delivered"] / max(1, self.counts["expected"])

    def times(self) -> NDArray[np.float64]:
        """How long every op of every rank took, ms, rising."""
        return np.sort([done.took / MS for node in self.nodes for done in node.over])
