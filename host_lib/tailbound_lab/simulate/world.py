"""A job of ranks of the real engine in virtual time: ``Transpose``, ``Job``, codec, send queue, udp datapath's rules.

Replaced is what touches the machine: sockets (``machine.Wire``), the receiving thread (``machine.Datapath``), the
sleeping transport thread (``Rank``) and the clock, which moves on by a little with every look at it. Packets are taken
in while a rank's processes are stopped, as a kernel does. Not there: the thread that says HOLD while Python cannot
(``machine.Heartbeat``), ``Communicator`` with its proof of reachability, XDP and fan-out; a rank
that is lost asks another engine, not the reliable path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import layout_tag, shape_for
from tailbound.collective.job import Job
from tailbound.collective.op import Launch, Outcome
from tailbound.errors import TailboundError, TransportError
from tailbound.transport.config import Config
from tailbound.transport.keys import MASTER, KeyRing
from tailbound.transport.sender import Sender
from tailbound.transport.sequence import Layout
from tailbound.wire.address import words_of
from tailbound.wire.bits import Bits, number_of
from tailbound_lab.simulate.engine import Done, Engine, Plan
from tailbound_lab.simulate.fabric import MS, US, Burst, Fabric, Terms
from tailbound_lab.simulate.machine import COOKIE, PORT, Datapath, Wire, address

#: Of all ranks, which code one after the other.
_scratch = cache(Scratch)

#: Steps of an epoch of keys: several epochs in a short run.
EPOCH_STEPS = 8


@dataclass
class Rank:
    """One rank: its engine, what has come of its ops, and its training thread."""

    world: World
    rank: int
    engine: Engine
    datapath: Datapath
    step: int = 0
    over: list[Done] = field(default_factory=list)
    stopped: int = 0  #: until when its processes do not run, ns
    pause: int = 0  #: for how long it holds before its next step, ns
    ahead: int = 0  #: of its kernel's clock, ns
    lost: bool = False  #: its next step is where the others are
    dead: bool = False
    _waiting: int = 0
    _launched: int = 0
    _behind: bool = False
    _poked: bool = False
    _busy: int = 0
    _number: int = 0

    # -- the transport thread -----------------------------------------------------------------------------------------

    def poke(self) -> None:
        """The transport thread takes a turn as soon as it runs."""
        self._poked = True
        self.wake()

    def wake(self) -> None:
        """Something came for the transport thread, which looks at it as soon as it runs."""
        self._schedule(self.world.fabric.now)

    def _schedule(self, when: int) -> None:
        fabric = self.world.fabric
        when = max(when, self._busy, self.stopped)
        self._number += 1
        number = self._number
        fabric.at(when, lambda: self._run(number))

    def _run(self, number: int) -> None:
        if number != self._number or self.dead:
            return  # woken up by something else in the meantime
        now, ahead = self.world.fabric.now, self.ahead
        if now < max(self._busy, self.stopped):
            self._schedule(now)
            return
        if waits := self.world.waits_for_a_core():
            self._busy = now + waits
            self.engine.waited += waits
            self._schedule(now)
            return
        wake = 0 if self._poked else self.engine.look_out(now + ahead)
        if not wake:
            self._poked = False
            wake = self.engine.turn(now + ahead)
            self.after_turn(now + ahead, self.engine.due)
            self._busy = self.world.fabric.clock
        if self.engine.job.queue.full:
            room = self.world.fabric.room_at(self.rank, self.world.number) + ahead
            wake = min(wake, room)  # room in the socket wakes it up
        self._schedule(wake - ahead)

    def after_turn(self, began: int, ends: int) -> None:
        """For who checks what must hold after every turn.

        Args:
            began: when the turn began, by this rank's clock, ns.
            ends: when the engine wants the next one at the latest.
        """

    # -- the training thread ------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Begins the next step, unless the training is over; a rank that is lost joins the others first."""
        world = self.world
        if self.dead:
            return
        if self.lost or self.engine.job.steps.lost or self.engine.job.sequence.adrift:
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
        self._behind = self.engine.job.steps.behind > 0
        if not self._behind:
            when += world.compute_of(self)
        buckets = world.buckets_of(self)
        self._waiting, self._launched = len(buckets), 0
        for number, (bucket, numel) in enumerate(buckets):
            last = bucket == buckets[-1][0]
            world.fabric.at(when, self._launching(number, self.step, bucket, numel, last=last))
            when += 0 if self._behind else world.vary(world.plan.gap)

    def _join(self) -> int:
        """Leaves behind what cannot be had any more (``comeback.jump``, without its requests); the steps skipped."""
        job, others = self.engine.job, self.world.nodes
        for donor in sorted(job.membership.live, key=lambda rank: -others[rank].step):
            if others[donor].dead or others[donor].stopped > self.world.fabric.now:
                continue
            try:
                return self.engine.jump(others[donor].engine.position())
            except TransportError:
                continue
        return 0

    def _launching(self, number: int, step: int, bucket: int, numel: int, *, last: bool) -> Callable[[], None]:
        def launch() -> None:
            fabric = self.world.fabric
            if self.dead:
                return
            # a stop that was made longer has put off those before it
            if fabric.now < self.stopped or self._launched < number:
                fabric.at(max(fabric.now, self.stopped), launch)
                return
            self._launched += 1
            self._launch(step, bucket, numel, last=last)

        return launch

    def _launch(self, step: int, bucket: int, numel: int, *, last: bool) -> None:
        world = self.world
        data = world.gradient(self.rank, step, bucket, numel)
        out = np.full(numel, np.nan, np.float32)

        def done(done: Done) -> None:
            self.done(done, out)

        try:
            self.submit(bucket, data, out, done, last=last, bits=world.bits_of(step))
        except TailboundError as error:  # its training ends
            world.failed(self.rank, error)
            self.dead = True
            self.poke()

    def submit(
        self,
        bucket: int,
        data: NDArray[np.float32],
        out: NDArray[np.float32],
        done: Callable[[Done], None],
        *,
        last: bool = True,
        bits: Bits = 8,
    ) -> None:
        """Launches an all-reduce; ``done`` is called at its end.

        Args:
            bucket: index in its step.
            data: f32[numel] of this rank; may be written over.
            out: f32[numel], for the mean.
            done: gets what became of it.
            last: of its step.
            bits: of a code.

        Raises:
            TailboundError: the engine takes no more.
        """
        world, numel = self.world, len(data)
        launched = world.fabric.clock + self.ahead
        shape, mode = shape_for(numel, world.width, bits), number_of(bits) << 2
        tag = layout_tag(
            bucket=bucket, whole=numel, numel=numel, dtype="float32", chunk=0, world_size=world.ranks,
            width=world.width, mode=mode, last=last,
        )  # fmt: skip

        def over(outcome: Outcome) -> None:
            try:
                ended, deadline = self.engine.ended[outcome.label], self.engine.job.deadlines.advertised
                finished = world.fabric.clock + self.ahead
                done(Done(outcome.label, outcome, launched, finished, *ended, deadline))
            except BaseException as error:  # the engine would log it and go on
                world.error = world.error or error

        layout = Layout((bucket, numel, 0, mode), shape, tag, last)
        contribute = not self._behind
        self.engine.launch(Launch(layout, data, out, over, launched, contribute=contribute))
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


class World:
    """A job of ``ranks`` in virtual time.

    Args:
        ranks: how many.
        seed: of everything.
        terms: of the network.
        plan: of the training.
        steps: of the training.
        paced: bytes per second towards every peer that pacing begins with; 0: no limit.
        limits: fields of ``schema.LINK``, for networks that are smaller than real ones.
        width: entries of a row.
        rows: of the rings of sums and results.
        fabric: the network, if others send over it, too.
        number: of this job on ``fabric``.
        settings: of ``transport.config.Config``.
    """

    engine = Engine
    node = Rank
    datapath = Datapath

    def __init__(
        self,
        ranks: int = 4,
        seed: int = 1,
        terms: Terms | None = None,
        plan: Plan | None = None,
        steps: int = 30,
        paced: float = 0.0,
        limits: Mapping[str, float] | None = None,
        width: int = 64,
        rows: tuple[int, int] = (1024, 4096),
        fabric: Fabric | None = None,
        number: int = 0,
        **settings: Any,
    ) -> None:
        self.ranks, self.steps, self.width, self.rows, self.number = ranks, steps, width, rows, number
        self.plan = plan or Plan()
        self._settings = {"share_rows": False, "width": width, "codec_threads": 1} | settings
        if fabric is None:
            fabric = Fabric(self.ends, seed, terms)
            fabric.deliver = self.take
        self.fabric = fabric
        self.work = self.fabric.random.choice((2, 20, 200)) * US
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._seed = seed
        self._paced, self._limits = paced, limits or {}
        self.prepare()
        self.nodes = [self.open(rank) for rank in range(ranks)]

    @property
    def ends(self) -> int:
        """How many links its network has."""
        return self.ranks

    def prepare(self) -> None:
        """What there has to be before the ranks are."""

    def peers_of(self, config: Config) -> dict[int, tuple[str, int]]:
        """Addresses of all whom a rank sends to."""
        others = [(config.rank + i) % self.ranks for i in range(1, self.ranks)]
        return {other: (address(other), PORT) for other in others}

    def open(self, rank: int) -> Rank:
        """A process of ``rank``."""
        config = Config(rank=rank, ranks=self.ranks, **self._settings)
        wire = Wire(rank, self.fabric, self.number)
        datapath = self.datapath(rank, self.width, *self.rows, wire)
        node = self.node(self, rank, cast(Any, None), datapath)
        job = Job(
            config,
            datapath,
            Sender([wire], self.peers_of(config)),
            COOKIE,
            lambda: self._clock() + node.ahead,
            keys=self._keys(config, datapath),
            scratch=_scratch(config.width),
        )
        pacer = job.queue.pacer
        for name, value in self._limits.items():
            setattr(pacer.link, name, value)
        if self._paced:
            pacer.link.speed = 2 * self._paced * len(pacer.paths)  # no rate falls below half of an equal share
            for peer in pacer.paths:
                pacer.hold_to(peer, self._paced)
        pacer.stated = pacer.link.speed
        job.activate([words_of(address(r)) for r in range(job.world)], words_of(address(rank)))
        node.engine = self.engine(job)
        node.engine.begin()
        return node

    def _keys(self, config: Config, datapath: Datapath) -> KeyRing | None:
        """Those of a job that has some: made of a secret that is none, and of shorter epochs than in earnest."""
        if not config.keyed:
            return None
        return KeyRing(bytes(MASTER), COOKIE, self.width, period=EPOCH_STEPS, install=datapath.put_key)

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

    def bits_of(self, step: int) -> Bits:
        """Of a code in ``step``."""
        return 8

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

    def take(self, burst: Burst) -> None:
        """A rank's network card has received it."""
        node = self.nodes[burst.to]
        state = node.datapath.tables.state
        before = state[:4].tobytes()
        for echo in node.datapath.feed(burst, self.fabric.now):
            self.fabric.send(Burst(burst.to, burst.source, echo, len(echo), self.number))
        if state[:4].tobytes() != before:  # events or control packets: they wake the thread up
            node.wake()

    def finished(self, rank: int, done: Done, out: NDArray[np.float32]) -> None:
        """An op of ``rank`` is over; ``out`` f32[numel] is its result."""
        self.counts["expected"] += done.outcome.expected
        self.counts["delivered"] += done.outcome.delivered

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
        """Trains on to the end, until everybody is at rest; at most ``most`` ns of virtual time."""
        alive, now, config = self.alive, self.fabric.now, self.nodes[0].engine.job.config
        rest = max(max(0, node.stopped - now) + node.pause for node in alive)
        start = max(4 * rest, *(node.engine.job.deadlines.start_max for node in alive))  # D_start follows it
        longest = config.bound - config.start_max + start + self.plan.compute * 2
        longest = longest * (self.steps + 1 - min(node.step for node in alive)) + rest
        self.until(lambda: all(n.dead or (n.step >= self.steps and n.engine.idle) for n in self.nodes), most or longest)
        return self

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

    def times(self) -> NDArray[np.float64]:
        """How long every op of every rank took, ms, rising."""
        return np.sort([done.took / MS for node in self.nodes for done in node.over])
