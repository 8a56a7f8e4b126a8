"""Ranks of the real engine in virtual time: ``Transpose``, ``Job``, codec, send queue and the udp datapath's rules.

Replaced is what touches the machine: sockets (``_Wire``), the receiving thread (``_Datapath``), the sleeping transport
thread (``Rank``) and the clock, which moves on by a little with every look at it. Packets are taken in while a rank's
processes are stopped, as a kernel does. A switch that sums is the reference of the tests (``reference_switch``). Not
there: the thread that says HOLD while Python cannot (``_Heartbeat``), ``Communicator`` with its proof of reachability,
XDP, fan-out and multicast; a rank that is lost asks another engine, not the reliable path.

What must hold is checked after every turn and every op (``Rank.check``, ``Sums``, ``World.finished``):

- acknowledgements of a peer never go back (clock-7b);
- what a rank has let go it has acknowledged: nobody waits for a rank that has forgotten an op (clock-19);
- the first turn in which D_start and twice ``stage_max`` are over ends an op, and the engine has asked for one by then
  (clock-12);
- sums that are sealed are those of what their contributors have sent (kernel-16);
- an op that the compiled look passes over has nothing to do, and no earlier time to look (``collective.running``);
- results are written, and who has lost nothing of an op has the bits of the others who have not;
- every packet that arrived has one verdict in the ledger, and rows in sums are those stored and added without those
  abandoned (kernel-21).
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field, replace
from typing import Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray

from messages import read
from reference_switch import Rules
from sim.fabric import MS, US, Burst, Fabric, Terms
from sim.sums import Sums
from sim.switch import SimSwitch
from tailbound.codec.scale import headroom_of
from tailbound.codec.shape import layout_tag, shape_for
from tailbound.collective.job import Job
from tailbound.collective.known import Known
from tailbound.collective.op import Launch, Op, Outcome
from tailbound.collective.running import Running
from tailbound.collective.step import listen, overtaken, start_clock, step
from tailbound.collective.tally import rows_by_rank
from tailbound.collective.transpose import Transpose
from tailbound.collective.view import View
from tailbound.datapath.ingest import ingest
from tailbound.datapath.protocol import EventRecord, Store
from tailbound.datapath.store import allocate, store_of
from tailbound.datapath.tables import CONTROL_HEAD, CONTROL_TAIL, EVENT_HEAD, EVENT_TAIL, Tables
from tailbound.errors import TailboundError, TransportError
from tailbound.transport.agreement import Content
from tailbound.transport.config import Config
from tailbound.transport.pace import Pacer, TimelyConfig
from tailbound.transport.sender import Sender
from tailbound.transport.sequence import Layout
from tailbound.transport.sockets import UdpSocket
from tailbound.transport.steps import step_of
from tailbound.transport.switch import Switch
from tailbound.wire.schema import OP_INDEX_BITS, UNKNOWN_SENDER, Verdict, serial_distance

PORT = 5515
COOKIE = 0x5EED
#: Descriptors that stand for the datapath's queues, and where the state of these is.
_EVENTS, _CONTROLS = 1001, 1002
_QUEUES = {_EVENTS: (EVENT_HEAD, EVENT_TAIL), _CONTROLS: (CONTROL_HEAD, CONTROL_TAIL)}


def address(rank: int) -> str:
    """Of a simulated rank: one that no host has (RFC 5737), since a job asks for the speed of its own interface."""
    return f"192.0.2.{1 + rank}"


def switch_of(ranks: int) -> Switch:
    """The switch of a job of ``ranks``."""
    return Switch(address(ranks), PORT, 2048)


def _word(rank: int) -> int:
    return int.from_bytes(socket.inet_aton(address(rank)), "little")


class _Datapath:
    """The udp datapath's tables without its socket and thread (``datapath.protocol.Datapath``)."""

    name = "udp"
    interface = ""
    gap = 0
    lost_on_arrival: ClassVar[dict[str, int]] = {}

    def __init__(self, rank: int, width: int, rows: int, result_rows: int, wire: _Wire) -> None:
        self.tables = Tables(allocate(width, rows, result_rows))
        self.store: Store = store_of(self.tables.arrays)
        self.sums = Sums(self.store, COOKIE)
        self.endpoint = address(rank), PORT
        self.socket = cast(UdpSocket, wire)
        self.taken = 0
        self._echoes = np.zeros((64, 2), np.int64)

    def feed(self, burst: Burst, now: int) -> list[bytes]:
        """Takes in what has arrived; the echoes to send back."""
        self.sums.came(burst)
        buffer = np.zeros(max(8, -(-len(burst.data) // 8) * 8), np.uint8)
        buffer[: len(burst.data)] = np.frombuffer(burst.data, np.uint8)
        segment = burst.stride if len(burst.data) > burst.stride else 0
        arguments = (buffer, len(burst.data), segment, _word(burst.source), now, self._echoes)
        echoes = self._echoes[: ingest(self.tables.context, *arguments)].tolist()
        self.taken += burst.count
        return [buffer[at : at + length].tobytes() for at, length in echoes]

    def reset(self, first_op: int) -> None:
        self.tables.seal((first_op - 1) & 0xFFFFFFFF, 0, self.store.sum_rows)

    def seal(self, op: int, seq: int, rows: int) -> None:
        self.tables.seal(op, seq, rows)
        self.sums.sealed(op, seq, rows)

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
    """For ``transport.sockets.Waiter``: whether anything is queued."""

    def __init__(self, tables: Tables) -> None:
        self._state = tables.state

    def readable(self, fd: int) -> bool:
        head, tail = _QUEUES.get(fd, (0, 0))
        return bool(self._state[head] != self._state[tail])


class _Heartbeat:
    """For ``holding.Heartbeat``: no thread; nothing is repeated."""

    def __init__(self, peers: int) -> None:
        self._peers = peers

    def said(self, packets: list[bytes], now: int) -> None:
        return None

    def repeated(self) -> list[int]:
        return [0] * self._peers

    def stop(self) -> None:
        return None


@dataclass
class _RunQueue:
    """For ``transport.cores.RunQueue``: how long the transport thread of a rank has waited for a core, ns."""

    total: int = 0

    def waited(self) -> int:
        return self.total


class _Checked(Running):
    """Looks at what is passed over all the same: there must be nothing to do, and no earlier look.

    ``every``: in one of so many turns.
    """

    def __init__(self, known: Known, every: int) -> None:
        self._every, self._turns, self._now = every, 0, 0
        super().__init__(known)

    def find(self, now: int) -> int:
        self._now = now
        self._turns += 1
        return super().find(now)

    def has_news(self, op: Op) -> bool:
        news = super().has_news(op)
        if news or op.finished or self._turns % self._every:
            return news
        view, before = View(self._known, op), self._state(op)
        begins, late = start_clock(op, view, self._now), overtaken(op, view, self._now)
        found = step(op, view, self._now, may_send=True)
        look = min((look for look in (begins, found.look) if look), default=0)
        assert not found.actions, f"op {op.name} had no news, but {found.actions}"
        assert not late, f"op {op.name} had no news, but all others are through with it"
        known = int(self._waits["look"][op.row])
        assert look == known, f"op {op.name} is to be looked at at {look}, not at {known}"
        assert self._state(op) == before, f"op {op.name} had no news: {before}, {self._state(op)}"
        return False

    @staticmethod
    def _state(op: Op) -> tuple[object, ...]:
        return op.start, *((half.phase, *astuple(half.clock), half.quiet.since) for half in (op.first, op.second))

    def silent(self, ops: Iterable[Op], now: int) -> tuple[list[Op], int]:
        ops = list(ops)
        found, look = super().silent(ops, now)
        if self._turns % self._every:
            return found, look
        left = [op for op in ops if op not in found and op.encoded and not op.finished]
        for op in left:
            before = self._asked(op)
            said = listen(op, View(self._known, op), now)
            assert not said.actions, f"nobody was to be asked about op {op.name}, but {said.actions}"
            assert self._asked(op) == before, f"nothing was new of op {op.name}: {before}, {self._asked(op)}"
        quiet = [op for op in ops if not self._found[op.row] and op.encoded and not op.finished]
        assert look == min((op.probe.again for op in quiet), default=0)
        return found, look

    @staticmethod
    def _asked(op: Op) -> tuple[object, ...]:
        probe = op.probe
        questions = ((question.due, question.asked) for question in (probe._soon, probe._late, probe._idle))
        return probe.again, probe._progress, probe._since, probe._called, *questions


class _Engine(Transpose):
    """The real engine without its thread.

    Attributes:
        ended: by the label of an op, rows of each rank that have not come, contributions and results, and whether one
            of its halves ended by quiet.
    """

    ended: dict[int, tuple[Counter[int], bool]]

    def begin(self, every: int) -> None:
        """In place of ``start``; ``every``: of ``_Checked``."""
        self.ended = {}
        self._run_queue: Any = _RunQueue()
        self._event_fd, self._control_fd = self.job.datapath.fds()
        self._group_fd = -1
        self._waiter = cast(Any, _Ready(cast(_Datapath, self.job.datapath).tables))
        self._window.running = _Checked(self.job, every)
        self._holding._heartbeat.stop()
        self._holding._heartbeat = cast(Any, _Heartbeat(len(self.job.peers)))

    def end(self) -> None:
        """In place of ``close``."""
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
            self.job.threads.close()

    def _poke(self) -> None:
        return None

    @property
    def launched(self) -> list[Op]:
        """Ops that have been launched here and are not over."""
        return [op for op in self._ops.values() if op.launch is not None and not op.finished]

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
        rows_by_rank(
            job.records.slots, op.place.sum_seqs[job.rank], own, job.records.sum_mask, job.cookie, op.label, summed
        )
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
    pause: int = 0  #: for how long it holds before its next step, ns
    away: int = 0  #: for how long its training does nothing before its next step, without a word, ns
    ahead: int = 0  #: of its kernel's clock, ns
    lost: bool = False  #: its next step is where the others are
    dead: bool = False
    _waiting: int = 0
    _behind: bool = False
    _end: int = 0
    _busy: int = 0
    _number: int = 0
    _start_most: int = 0
    #: by name, the others' acknowledgements and whose are known
    _marks: dict[str, tuple[list[int], list[bool]]] = field(default_factory=dict)
    _told: bytes = b""  # what the others had said when that was looked at last
    _books: tuple[object, ...] = ()  # the ledger, what had arrived and what was in sums when they were looked at last

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
        now, ahead = self.world.fabric.now, self.ahead
        if now < max(self._busy, self.stopped):
            self._schedule(now, turn=turn)
            return
        if waits := self.world.waits_for_a_core():
            self._busy = now + waits
            self.engine._run_queue.total += waits
            self._schedule(now, turn=turn)
            return
        if not turn:
            wake = self.engine.look_out(now + ahead, self._end)
            if wake:
                self._schedule(wake - ahead, turn=False)
                return
        self._end, wake = self.engine.turn(now + ahead)
        self.check(now + ahead, self._end)
        self._busy = self.world.fabric.clock
        if self.engine.job.flow.queue.full:
            wake = min(wake, self.world.fabric.room_at(self.rank) + ahead)  # room in the socket wakes it up
            self._end = min(self._end, wake)
        self._schedule(wake - ahead, turn=False)

    # -- the training thread ------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Begins the next step, unless the training is over; a rank that is lost joins the others first."""
        world = self.world
        if self.dead:
            return
        if self.away:
            world.fabric.at(world.fabric.now + self.away, self.train)
            self.away, self.lost = 0, True
            return
        if self.lost or self.engine.standing().lost or self.engine.job.sequence.adrift:
            self.lost = False
            self.step = min(world.steps, self.step + self._join())
        if self.step >= world.steps:
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
        for donor in sorted(job.membership.live, key=lambda rank: -others[rank].step):
            if others[donor].dead or others[donor].stopped > self.world.fabric.now:
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
        launched = world.fabric.clock + self.ahead
        shape = shape_for(numel, world.width, 8)
        tag = layout_tag(
            bucket=bucket, numel=numel, dtype="float32", chunk=0, world_size=world.ranks, width=world.width, mode=0
        )

        def done(outcome: Outcome) -> None:
            try:
                ended, deadline = self.engine.ended[outcome.label], self.engine.job.deadlines.advertised
                finished = world.fabric.clock + self.ahead
                self.done(Done(outcome.label, outcome, launched, finished, *ended, deadline), out)
            except BaseException as error:  # the engine would log it and go on
                world.error = world.error or error

        try:
            layout = Layout((bucket, numel, 0, 0), shape, tag, last)
            self.engine.launch(Launch(layout, data, out, done, launched, contribute=not self._behind))
        except TailboundError as error:  # its training ends
            world.failed(self.rank, error)
            self.dead = True
        self.poke()

    def done(self, done: Done, out: NDArray[np.float32]) -> None:
        """An op is over; ``out`` f32[numel] is its result."""
        if done.outcome.error is not None:
            self.world.failed(self.rank, done.outcome.error)
        self.over.append(done)
        self.world.finished(self.rank, done, out)
        self._waiting -= 1
        if self._waiting == 0:
            self.step += 1
            self.world.fabric.at(self.world.fabric.now, self.train)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check(self, began: int, ends: int) -> None:
        """What must hold after every turn.

        Args:
            began: when the turn began, by this rank's clock, ns.
            ends: when the engine wants the next one at the latest.
        """
        job = self.engine.job
        states = job.store.peer_states[: job.world]
        if (told := states.tobytes()) != self._told:  # else nobody has said anything since it was looked at
            self._told = told
            self._check_marks(states)
        released = int(job.store.control["released"][0])
        for name in ("contributed", "published"):
            own = int(getattr(job.marks, name))
            assert serial_distance(own, released) >= 0, f"rank {self.rank} let {released} go and said {name} {own}"
        # what a step computes makes D_start longer, and ops that have begun keep what they began with
        self._start_most = max(self._start_most, job.deadlines.start_max)
        for op in self.engine.launched:
            due = max(op.admitted, op.held) + self._start_most + job.config.bound - job.config.start_max
            assert began < due, f"rank {self.rank}: op {op.name} goes on {(began - due) / MS:.1f} ms after its bound"
            assert ends <= due, f"rank {self.rank} looks after op {op.name} {(ends - due) / MS:.1f} ms after its bound"
        self.check_books()

    def _check_marks(self, states: NDArray[np.void]) -> None:
        """Acknowledgements of the others never go back."""
        known = [cookie == self.engine.job.cookie for cookie in states["cookie"].tolist()]
        for name in ("contributed", "published"):
            now = states[name].tolist()
            before, there = self._marks.get(name, (now, known))
            marks = enumerate(zip(now, before, there, strict=True))
            back = [peer for peer, (new, old, was) in marks if was and serial_distance(new, old) < 0]
            assert not back, f"rank {self.rank}: {name} of ranks {back} went back"
            self._marks[name] = now, known

    def check_books(self, *, over: bool = False) -> None:
        """Every packet that arrived has one verdict, and every row in sums that were sealed is in the books.

        ``over``: all ops are, so that the books have no other row either, unless the rank has left ops behind.
        """
        job, whole_ledger = self.engine.job, self.engine.job.store.ledger["verdict"]
        # rows of whoever may send; what is entered in another one is missing in the sum
        entries = whole_ledger[: job.world].tobytes(), whole_ledger[UNKNOWN_SENDER].tobytes()
        books = *entries, self.datapath.taken, self.datapath.sums.rows
        if books == self._books and not over:  # else nothing was entered since they were looked at
            return
        self._books = books
        ledger = np.frombuffer(b"".join(entries), np.uint64).reshape(job.world + 1, -1).sum(axis=0)
        verdicts = int(ledger.sum()) - int(ledger[Verdict.ABANDONED])
        assert verdicts == self.datapath.taken, f"rank {self.rank}: {verdicts} verdicts, {self.datapath.taken} came"
        rows = int(ledger[Verdict.STORED]) + int(ledger[Verdict.ADDED]) - int(ledger[Verdict.ABANDONED])
        summed, left = self.datapath.sums.rows, job.counters
        whole = over and not (left["jumps"] or left["predictions_wrong"])
        assert rows == summed if whole else rows >= summed, f"rank {self.rank}: {rows} rows, {summed} in sums"

    def check_strangers(self) -> None:
        """Nothing is booked for ranks that there are not."""
        strangers = self.engine.job.store.ledger["verdict"][self.engine.job.world : UNKNOWN_SENDER]
        assert not strangers.any(), f"rank {self.rank} has verdicts on what strangers sent"


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
        settings: of ``transport.config.Config``; with a ``switch`` (``switch_of``) that one owns the rows.
    """

    engine = _Engine
    #: the compiled look is checked in one of so many turns; that changes nothing of what happens
    every = 4

    def __init__(
        self,
        ranks: int = 4,
        seed: int = 1,
        terms: Terms | None = None,
        plan: Plan | None = None,
        steps: int = 30,
        paced: float = 0.0,
        limits: TimelyConfig | None = None,
        width: int = 64,
        rows: tuple[int, int] = (1024, 4096),
        **settings: Any,
    ) -> None:
        self.ranks, self.steps, self.width, self.rows = ranks, steps, width, rows
        self.plan = plan or Plan()
        self.fabric = Fabric(ranks + (settings.get("switch") is not None), seed, terms)
        self.fabric.deliver = self._deliver
        self.work = self.fabric.random.choice((2, 20, 200)) * US
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._seed = seed
        self._whole: dict[int, tuple[int, bytes]] = {}  # op: who had all of it first, and its bits
        self._forgot = -1  # newest op that had begun when the switch forgot its rows
        switch = settings.get("switch")
        self.switch: SimSwitch | None = None
        if switch is not None:
            rules = Rules(COOKIE, ranks, headroom_of(ranks), switch.rows, switch.form)
            self.switch = SimSwitch(self.fabric, rules)
        self._settings = {"share_rows": False, "width": width, "codec_threads": 1} | settings
        self._paced, self._limits = paced, limits
        self.nodes = [self._open(rank) for rank in range(ranks)]

    def _open(self, rank: int) -> Rank:
        config = Config(rank=rank, ranks=self.ranks, **self._settings)
        wire = _Wire(rank, self.fabric)
        datapath = _Datapath(rank, self.width, *self.rows, wire)
        peers = {(rank + i) % self.ranks: (address((rank + i) % self.ranks), PORT) for i in range(1, self.ranks)}
        if config.switch is not None:
            peers[self.ranks] = config.switch.address, config.switch.port
        node = Rank(self, rank, cast(Any, None), datapath)
        job = Job(config, datapath, Sender([wire], peers), COOKIE, lambda: self._clock() + node.ahead)
        if self._limits is not None:
            job.flow.queue.pacer = Pacer(job.sender.peers, self._limits)
        if self._paced:
            for peer, path in job.flow.queue.pacer.paths.items():
                path.rate = self._paced
                job.flow.queue.pacer.limited.add(peer)
        job.activate([_word(r) for r in range(job.world)], _word(rank))
        node.engine = self.engine(job)
        node.engine.begin(self.every)
        return node

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
        pause, node.pause = node.pause, 0
        return pause

    def waits_for_a_core(self) -> int:
        """For how long a transport thread that could run does not, ns."""
        return 0

    def failed(self, rank: int, error: BaseException) -> None:
        """An op of ``rank`` has an error."""
        raise error

    # -- the course of things -----------------------------------------------------------------------------------------

    def _deliver(self, burst: Burst) -> None:
        if burst.to == self.ranks:
            assert self.switch is not None
            self.switch.take(burst)
            return
        node = self.nodes[burst.to]
        before = node.datapath.tables.state[:4].tobytes()
        for echo in node.datapath.feed(burst, self.fabric.now):
            self.fabric.send(Burst(burst.to, burst.source, echo, len(echo)))
        if node.datapath.tables.state[:4].tobytes() != before:  # events or control packets: they wake the thread up
            node.poke()

    def finished(self, rank: int, done: Done, out: NDArray[np.float32]) -> None:
        """Compares an op with what others have."""
        outcome = done.outcome
        self.counts["expected"] += outcome.expected
        self.counts["delivered"] += outcome.delivered
        assert np.isfinite(out).all(), f"op {done.label} of rank {rank} was not written"
        if outcome.missed or outcome.failed_groups or outcome.skipped or outcome.overwritten:
            return
        if self._forgot >= 0 and serial_distance(done.label, self._forgot) <= 0:
            return
        self.counts["compared"] += 1
        bits = hashlib.blake2b(out.tobytes(), digest_size=16).digest()
        first = self._whole.setdefault(done.label, (rank, bits))
        assert bits == first[1], f"op {done.label}: ranks {first[0]} and {rank} lost nothing and differ"

    def stop(self, rank: int, at: int, length: int) -> None:
        """Stops the processes of ``rank`` ``at`` ns from now for ``length`` ns; its kernel goes on."""

        def stop() -> None:
            node = self.nodes[rank]
            node.stopped = max(node.stopped, self.fabric.now + length)

        self._in(at, stop)

    def kill(self, rank: int, at: int) -> None:
        """Ends the processes of ``rank`` and its kernel program, ``at`` ns from now."""

        def kill() -> None:
            self.nodes[rank].dead = self.fabric.ends[rank].cut = True

        self._in(at, kill)

    def revive(self, rank: int) -> None:
        """A rank that was killed comes back: another process, which knows nothing and joins where the others are."""
        before = self.nodes[rank]
        before.engine.end()
        self.fabric.ends[rank].cut = False
        node = self.nodes[rank] = self._open(rank)
        node.over, node.lost = before.over, True
        node.poke()
        node.train()

    def propose(self, weights: tuple[int, ...]) -> bool:
        """The lowest rank that lives proposes that rows are dealt by these weights (clock-22); whether it could."""
        node = self.alive[0]
        job, agreement = node.engine.job, node.engine.maps.agreement
        owners = job.weights(weights, switched=False)
        content = Content(owners, agreement.agreed[-1].content.rotate)
        node.poke()
        return agreement.propose(content, step_of(job.sequence.upcoming), self.fabric.clock + node.ahead)

    def restart_switch(self, length: int = 0) -> None:
        """Its program is loaded anew, and it is away for ``length`` ns: all rows are forgotten, whole ones, too.

        Who asks for one again gets another one, of whoever is left: such ops are not compared (kernel-24).
        """
        assert self.switch is not None
        self.switch.restart()
        self.change(self.ranks, 0, cut=True)
        self.change(self.ranks, length, cut=False)
        for label in (node.engine.job.sequence.next_label for node in self.alive):
            if self._forgot < 0 or serial_distance(label, self._forgot) > 0:
                self._forgot = label

    def lose(self, loss: float, burst: float = 0.0) -> None:
        """Loses this share of the packets from now on, see ``Terms``."""
        self.fabric.terms = replace(self.fabric.terms, loss=loss, burst=burst)

    def change(self, rank: int, at: int, **terms: float) -> None:
        """Changes what the link of ``rank`` is like (``_End``) ``at`` ns from now."""

        def change() -> None:
            for name, value in terms.items():
                setattr(self.fabric.ends[rank], name, value)

        self._in(at, change)

    def _in(self, length: int, what: Callable[[], None]) -> None:
        if length:
            self.fabric.at(self.fabric.now + length, what)
        else:
            what()

    def start(self) -> Self:
        """All ranks begin to train."""
        for node in self.nodes:
            node.poke()
            node.train()
        return self

    def go(self, length: int) -> None:
        """Trains on for ``length`` ns."""
        end = self.fabric.now + length
        self.fabric.at(end, lambda: None)
        self.until(lambda: self.fabric.now >= end, length)

    def run(self, most: int | None = None) -> Self:
        """Trains to the end; see ``finish``."""
        return self.start().finish(most)

    def finish(self, most: int | None = None) -> Self:
        """Trains on to the end, and checks that everybody is at rest then; at most ``most`` ns of virtual time."""
        alive, now = self.alive, self.fabric.now
        longest = self.nodes[0].engine.job.config.bound + self.plan.compute * 2
        longest *= self.steps + 1 - min(node.step for node in alive)
        longest += max(max(0, node.stopped - now) + node.pause + node.away for node in alive)
        self.until(lambda: all(n.dead or (n.step >= self.steps and n.engine.idle) for n in self.nodes), most or longest)
        for node in self.alive:
            node.check_books(over=True)
            node.check_strangers()
        return self

    def error_of(self, done: Done, out: NDArray[np.float32]) -> float:
        """Squared error of a result against the mean of all ranks, over the squared length of that mean."""
        bucket, size = done.label & ((1 << OP_INDEX_BITS) - 1), len(out)
        mean = np.mean([self.gradient(r, done.step, bucket, size) for r in range(self.ranks)], axis=0, dtype=np.float64)
        return float(((out - mean) ** 2).sum() / (mean**2).sum())

    def close(self) -> None:
        """Closes what the engines have opened; may be called twice."""
        for node in self.nodes:
            node.engine.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> list[Rank]:
        """Ranks that have not been killed."""
        return [node for node in self.nodes if not node.dead]

    def until(self, over: Callable[[], bool], most: int) -> None:
        """Trains on until ``over()``, for ``most`` ns at most."""
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
