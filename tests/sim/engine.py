"""Ranks of the real engine in virtual time (``tailbound_lab.simulate``), and what must hold, checked all the time.

A switch that sums is the reference of the tests (``reference_switch``). Checked after every turn and every op
(``Rank.after_turn``, ``Sums``, ``World.finished``):

- acknowledgements of a peer never go back (clock-7b);
- what a rank has let go it has acknowledged: no rank waits for a rank that has forgotten an op (clock-19);
- the first turn in which D_start and twice ``stage_max`` are over ends an op, and the engine has asked for one by then
  (clock-12);
- sums that are sealed are those of what their contributors have sent (kernel-16);
- flows that are not due have nothing to ask for, and no earlier time to look (``recovery.c``);
- ranks that place an op by the same owner map have its rows at the same places (clock-19);
- results are written, and who has lost nothing of an op has the bits of the others who have not;
- every packet that arrived has one verdict in the ledger, and rows in sums are those stored and added without those
  abandoned (kernel-21).
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from reference_switch import Rules
from sim.sums import Sums
from tailbound.collective.op import Op
from tailbound.kernel.core import core
from tailbound.transport.config import Config, Switch
from tailbound.transport.steps import step_of
from tailbound.wire.schema import HEADROOM, UNKNOWN_SENDER, Verdict, serial_distance
from tailbound_lab.simulate.engine import Done, Plan
from tailbound_lab.simulate.engine import Engine as UncheckedEngine
from tailbound_lab.simulate.fabric import MS, Burst, Fabric
from tailbound_lab.simulate.machine import COOKIE, PORT, Wire, address
from tailbound_lab.simulate.machine import Datapath as UncheckedDatapath
from tailbound_lab.simulate.world import Rank as UncheckedRank
from tailbound_lab.simulate.world import World as UncheckedWorld

__all__ = ["COOKIE", "PORT", "Datapath", "Done", "Engine", "Plan", "Rank", "World", "address", "switch_of"]


def switch_of(ranks: int, form: str = "mean") -> Switch:
    """The switch of a job of ``ranks``."""
    return Switch(address(ranks), PORT, 2048, form)


class SimSwitch:
    """The reference of a switch (``reference_switch``) at the end of a link of its own.

    Attributes:
        trouble: (rank, packet, whether it is a result) -> how often it passes.
        down: it neither takes nor sends anything.
    """

    def __init__(self, fabric: Fabric, rules: Rules) -> None:
        self._fabric, self.rules, self.down = fabric, rules, False
        self.trouble: Callable[[int, bytes, bool], int] = lambda rank, data, result: 1

    def restart(self) -> None:
        """Forgets all slots, like a switch whose program is loaded anew."""
        self.rules.slots.clear()

    def take(self, burst: Burst) -> None:
        ranks, sender = self.rules.ranks, burst.source
        copies = [data for data in burst.packets() for _ in range(self.trouble(sender, data, False))]
        for data in copies if not self.down else []:
            _, out, everybody = self.rules.take(data)
            for rank in range(ranks) if everybody else [sender]:
                for _ in range(self.trouble(rank, out, True) if out else 0):
                    self._fabric.send(Burst(ranks, rank, out, len(out)))


class Datapath(UncheckedDatapath):
    """Adds up once more what it takes in."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sums = Sums(self.store, COOKIE)

    def feed(self, burst: Burst, now: int) -> list[bytes]:
        self.sums.came(burst)
        return super().feed(burst, now)


class Engine(UncheckedEngine):
    """Looks at flows that are not due all the same: there must be nothing to ask for, and no earlier look."""

    #: ops whose own results were made and queued without a turn
    alone: set[int]
    #: at the end of one of so many turns; that changes nothing of what happens
    every = 4

    _turns, _turned = 0, False

    def begin(self) -> None:
        super().begin()
        self.alone = set()

    def look_out(self, now: int) -> int:
        then = super().look_out(now)
        self._add_up()
        self.alone |= {op.label for op in self._ops.values() if op.unnoted and op.queued}
        return then

    def _meanwhile(self, found: int = 0) -> int:
        self._add_up()
        return super()._meanwhile(found)

    def _add_up(self) -> None:
        """Looks at sums as soon as they are sealed."""
        for op in self._ops.values():
            if op.sealed and op.own and not hasattr(op, "added_up"):
                cast(Any, op).added_up = True
                cast(Datapath, self.job.datapath).sums.sealed(op.label, op.sum_seq, op.own)

    def _move(self, *now: int, **how: bool) -> None:
        self._turned = True
        super()._move(*now, **how)

    def _listen(self, now: int) -> None:
        super()._listen(now)
        turned, self._turned = self._turned, False
        self._turns += turned
        if not turned or self._turns % self.every or self._unsettled:  # then all are looked at in the next turn
            return
        for op in [op for op in self._ops.values() if not (op.stirred or now >= op.listen or op.finished)]:
            before, look = self._asked(op), op.listen
            asks = core().fast.tb_listen_to(self.job.terms.pointer, ctypes.addressof(op), now)
            assert not asks, f"nobody was to be asked about op {op.name}"
            assert not op.stirred, f"op {op.name} waits otherwise, but nothing was new of it"
            assert op.listen == look, f"the flows of op {op.name} are to be looked at at {op.listen}, not at {look}"
            assert self._asked(op) == before, f"nothing was new of op {op.name}: {before}, {self._asked(op)}"

    @staticmethod
    def _asked(op: Op) -> tuple[object, ...]:
        flows = (flow for half in (op.first, op.second) for flow in half.begun)
        return tuple((flow.due, flow.mark, flow.questions, flow.over) for flow in flows)


@dataclass
class Rank(UncheckedRank):
    """Checks itself after every turn."""

    _start_most: int = 0
    #: by name, the others' acknowledgements and whose are known
    _marks: dict[str, tuple[list[int], list[bool]]] = field(default_factory=dict)
    _told: bytes = b""  # what the others had said when that was looked at last
    _books: tuple[object, ...] = ()  # the ledger, what had arrived and what was in sums when they were looked at last

    @property
    def wire(self) -> Wire:
        """What it sends over, which may have trouble."""
        return cast(Wire, self.datapath.socket)

    def after_turn(self, began: int, ends: int) -> None:
        job = self.engine.job
        states = job.store.peer_states[: job.world]
        if (told := states.tobytes()) != self._told:  # else no rank has said anything since it was looked at
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
            assert op.stage_one == job.deadlines.stage_one(op.flow_bytes), (
                f"op {op.name} goes by what was known earlier"
            )
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
        books = *entries, self.datapath.taken, cast(Datapath, self.datapath).sums.rows
        if books == self._books and not over:  # else nothing was entered since they were looked at
            return
        self._books = books
        ledger = np.frombuffer(b"".join(entries), np.uint64).reshape(job.world + 1, -1).sum(axis=0)
        verdicts = int(ledger.sum())
        assert verdicts == self.datapath.taken, f"rank {self.rank}: {verdicts} verdicts, {self.datapath.taken} came"
        for wrong in (Verdict.BAD_TYPE, Verdict.CORRUPT):
            assert not ledger[wrong], f"rank {self.rank}: {ledger[wrong]} packets {wrong.name}, though none was changed"
        rows = int(ledger[Verdict.STORED]) + int(ledger[Verdict.ADDED])
        summed, left = cast(Datapath, self.datapath).sums.rows, job.counters
        whole = over and not (left["jumps"] or left["predictions_wrong"])
        assert rows == summed if whole else rows >= summed, f"rank {self.rank}: {rows} rows, {summed} in sums"


class World(UncheckedWorld):
    """A job whose ranks check themselves, and what may befall it; a ``switch`` (``switch_of``) owns the rows."""

    engine, node, datapath = Engine, Rank, Datapath
    nodes: list[Rank]

    @property
    def ends(self) -> int:
        return self.ranks + (self._settings.get("switch") is not None)

    def prepare(self) -> None:
        self._whole: dict[int, tuple[int, bytes]] = {}  # op: who had all of it first, and its bits
        self._places: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}  # of an op's rows, by it and its map
        self._forgot = -1  # newest op that had begun when the switch forgot its rows
        switch = self._settings.get("switch")
        rules = switch and Rules(COOKIE, self.ranks, HEADROOM, switch.rows, switch.form)
        self.switch = SimSwitch(self.fabric, rules) if rules else None

    def peers_of(self, config: Config) -> dict[int, tuple[str, int]]:
        switch = config.switch
        return super().peers_of(config) | ({self.ranks: (switch.address, switch.port)} if switch is not None else {})

    def take(self, burst: Burst) -> None:
        if burst.to == self.ranks:
            assert self.switch is not None
            self.switch.take(burst)
            return
        super().take(burst)

    def finished(self, rank: int, done: Done, out: NDArray[np.float32]) -> None:
        """Compares an op with what others have."""
        outcome, engine = done.outcome, self.nodes[rank].engine
        op = engine._ops.get(done.label)
        assert op is None or not op.unnoted, f"op {done.label} is given out without what its first half came to"
        if op is not None and not engine.job.sequence.adrift:
            found, key = (op.place.result_seq, op.place.sum_seqs), (op.label, op.place.placement.owner_map.id)
            assert self._places.setdefault(key, found) == found, f"op {op.name} of rank {rank} has places of its own"
        super().finished(rank, done, out)
        assert np.isfinite(out).all(), f"op {done.label} of rank {rank} was not written"
        if outcome.missed or outcome.failed_groups or outcome.skipped or outcome.overwritten:
            return
        if self._forgot >= 0 and serial_distance(done.label, self._forgot) <= 0:
            return
        self.counts["compared"] += 1
        bits = hashlib.blake2b(out.tobytes(), digest_size=16).digest()
        first = self._whole.setdefault(done.label, (rank, bits))
        assert bits == first[1], f"op {done.label}: ranks {first[0]} and {rank} lost nothing and differ"

    def stop(self, rank: int, length: int) -> None:
        """Stops the processes of ``rank`` for ``length`` ns; its kernel goes on."""
        node = self.nodes[rank]
        node.stopped = max(node.stopped, self.fabric.now + length)

    def kill(self, *ranks: int) -> None:
        """Ends the processes of ``ranks`` and their kernel programs."""
        for rank in ranks:
            self.nodes[rank].dead = self.fabric.ends[rank].cut = True

    def revive(self, rank: int) -> None:
        """A rank that was killed comes back: another process, which knows nothing and joins where the others are."""
        before = self.nodes[rank]
        before.engine.end()
        self.fabric.ends[rank].cut = False
        node = self.nodes[rank] = self.open(rank)
        node.over, node.lost = before.over, True
        node.poke()
        node.train()

    def propose(self, owners: tuple[int, ...]) -> bool:
        """The lowest rank that lives proposes that these own all rows (clock-22); whether it could."""
        node = self.alive[0]
        job, agreement = node.engine.job, node.engine.maps.agreement
        node.poke()
        return agreement.propose(owners, step_of(job.sequence.upcoming))

    def restart_switch(self, length: int = 0) -> None:
        """Its program is loaded anew, and it is away for ``length`` ns: all rows are forgotten, whole ones, too.

        Who asks for one again gets another one, of whoever is left: such ops are not compared (kernel-24).
        """
        assert self.switch is not None
        self.switch.restart()
        self.unplug(self.ranks, length)
        for label in (node.engine.job.sequence.next_label for node in self.alive):
            if self._forgot < 0 or serial_distance(label, self._forgot) > 0:
                self._forgot = label

    def unplug(self, rank: int, length: int) -> None:
        """Cuts the link of ``rank`` for ``length`` ns."""
        self.change(rank, cut=length > 0)
        self.fabric.at(self.fabric.now + length, lambda: self.change(rank, cut=False))

    def change(self, rank: int, **terms: float) -> None:
        """Changes what the link of ``rank`` is like (``_End``)."""
        for name, value in terms.items():
            setattr(self.fabric.ends[rank], name, value)

    def finish(self, most: int | None = None) -> Self:
        """As ``World.finish``; the books balance then."""
        super().finish(most)
        self.check_books(over=True)
        return self

    def check_books(self, *, over: bool = False) -> None:
        """Those of all ranks balance, see ``Rank.check_books``, and nothing is booked for ranks that there are not."""
        for node in self.alive:
            node.check_books(over=over)
            strangers = node.engine.job.store.ledger["verdict"][node.engine.job.world : UNKNOWN_SENDER]
            assert not strangers.any(), f"rank {node.rank} has verdicts on packets of strangers"

    @property
    def share(self) -> float:
        """Rows that arrived, of those expected."""
        return self.counts["delivered"] / max(1, self.counts["expected"])
