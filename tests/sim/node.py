"""One simulated rank: what its kernel notes, its transport thread, and its training thread.

The kernel part works while the process is stopped. The transport thread decides by the package's own code: ``stage``,
``clock``, ``deadline``, ``membership``, ``steps``, ``sequence``, ``repair``; coding and decoding take no time here.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sim.network import MS, Packets, World
from tailbound.codec.owners import OwnerMap
from tailbound.codec.shape import layout_tag, shape_for
from tailbound.collective.repair import PATIENCE, PATIENCE_MOST, REPEATS, REPEATS_COLD, SOON, Round, asked_most
from tailbound.transport.clock import LEAST_STEP, Extension, Quiet, majority, stage_start
from tailbound.transport.config import Config
from tailbound.transport.deadline import WARM_UP_OPS, Deadlines, Sample
from tailbound.transport.membership import HOLD_EVERY, Membership
from tailbound.transport.overtime import Overtime
from tailbound.transport.patience import Patience
from tailbound.transport.sequence import Layout, Place, Sequence
from tailbound.transport.silence import Silence
from tailbound.transport.stage import Repair, cut, decide
from tailbound.transport.steps import Steps, step_distance, step_of
from tailbound.wire.schema import HEADER_BYTES, op_label, serial_distance

#: Bursts that a flow is cut into where links are fast (it saves events), and rows of a real one.
BURSTS, BURST_ROWS = 4, 64
RING_STEPS = 2
_STOPPED = 350 * MS


@dataclass
class Record:
    """What the kernel knows of one op."""

    opened: int
    tag: int
    first_sender: int
    heard: dict[int, int] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    contributed: dict[int, int] = field(default_factory=dict)
    published: dict[int, int] = field(default_factory=dict)
    abstained: set[int] = field(default_factory=set)
    stayed_out: set[int] = field(default_factory=set)
    rows: Counter[int] = field(default_factory=Counter)
    results: Counter[int] = field(default_factory=Counter)
    majority: list[int] = field(default_factory=lambda: [0, 0])
    progress: int = 0
    late: bool = False


@dataclass
class SimOp:
    """One op on one rank."""

    place: Place
    launched: int = 0
    silent: bool = False
    encoded: bool = False
    own_present: bool = False
    own_in: int = 0
    start: int = 0
    held: int = 0
    sealed: int = 0
    published: bool = False
    finished: int = 0
    early: bool = False
    transfer_cut: int | None = None
    results_cut: int | None = None
    lost_1: float = 0.0
    lost_2: float = 0.0
    missing_rows: int = 0
    missing_results: int = 0
    expected: int = 0
    missing_of: Counter[int] = field(default_factory=Counter)
    overtaken: bool = False
    own_clock: Extension = field(default_factory=Extension)
    own_quiet: Quiet = field(default_factory=Quiet)
    result_clock: Extension = field(default_factory=Extension)
    result_quiet: Quiet = field(default_factory=Quiet)
    rounds: list[Round | None] = field(default_factory=lambda: [None, None])
    why: list[str] = field(default_factory=list)
    silence: Silence = field(default_factory=Silence)


@dataclass
class Peer:
    """Latest marks of one peer."""

    contributed: int = -1
    published: int = -1
    newest: int = -1
    deadline: int = 0
    last: int = 0
    spoke: int = 0


@dataclass
class Over:
    """A finished op, for the tests and the drawings."""

    step: int
    index: int
    launched: int
    finished: int
    expected: int
    rows: int
    results: int
    why: tuple[str, ...]
    d1: int
    late: bool
    missing_of: Counter[int]

    @property
    def complete(self) -> bool:
        """Whether both halves ended because nothing was missing."""
        return self.why == ("complete", "complete")


class Node:
    """A rank. ``plan`` is asked by the training thread what to do in every step (``sim.cases``)."""

    def __init__(self, world: World, rank: int, plan: Any, buckets: list[int]) -> None:
        self.world, self.rank, self.plan, self.buckets = world, rank, plan, buckets
        self.config = Config(rank, world.ranks)
        self.deadlines = Deadlines(self.config)
        self.overtime = Overtime(world.now)
        self.answers = Patience(SOON, PATIENCE_MOST)
        self.membership = Membership(world.ranks, rank)
        self.sequence = Sequence(world.ranks, OwnerMap(0, tuple(range(world.ranks))))
        self.steps = Steps(1)
        self.records: dict[int, Record] = {}
        self.peers = {p: Peer() for p in range(world.ranks) if p != rank}
        self.ops: dict[int, SimOp] = {}
        self.base = 0  # label from which on rows are taken
        self.mark_c = self.mark_p = op_label(0, 0) - 1 & 0xFFFFFFFF
        self.self_misses = 0
        self.pending: deque[Any] = deque()
        self.recent: deque[tuple[int, int]] = deque(maxlen=4)
        self.stopped = self.dead = self.joined = False
        self.holding = self.standing = False
        self.named = -1
        self.last_turn = world.now
        self.next_turn = 0
        self.alarm = self.rung = 0
        self.newest_heard = 0
        self.looked_at: tuple[int, int] | None = None
        self.inbox: list[Any] = []
        self.step = 0
        self.log: list[Over] = []
        self.errors: list[str] = []
        self.jumps = self.suspected = self.behind_steps = 0
        self.sizes: Counter[int] = Counter()
        self.done_in_step = 0
        self.in_step_ops = 0
        self.layouts: dict[tuple[int, int, int], Layout] = {}
        self.link = world.links[rank]
        self.link._stamp = self._stamp

    # -- kernel -----------------------------------------------------------------------------------------------------

    def take(self, p: Packets, rows: int, last: bool) -> None:
        """What the kernel does with a burst; also while the process is stopped."""
        if self.dead:
            return
        now, peer = self.world.now, self.peers[p.sender]
        for name in ("contributed", "published", "newest"):
            mark = getattr(p, name)
            if getattr(peer, name) < 0 or serial_distance(mark, getattr(peer, name)) > 0:
                setattr(peer, name, mark)
                peer.last = now
                if name == "newest":
                    self.newest_heard += 1
        peer.deadline = p.deadline
        if p.kind in ("hold", "unhold", "ask", "gone", "repair", "ready"):
            self.wake(lambda: self._spoke(p.sender))
        if p.kind in ("hold", "unhold"):
            self.wake(lambda: self._hold(p))
            return
        if p.kind == "ask":
            self.wake(lambda: self._control("gone", [p.sender], p.label, p.tag))
            return
        if p.kind == "gone":
            self.wake()
            return
        if p.kind == "repair":
            self.wake(lambda: self._answer(p))
            return
        if p.kind in ("contribution", "result", "answer", "again") and not rows:
            return
        ring_end = op_label((step_of(self.base) + RING_STEPS) & 0x3FFFFF, 0)
        if serial_distance(p.label, ring_end) >= 0:
            self.wake()
            return
        record = self.records.get(p.label)
        behind = serial_distance(p.label, self.base) < 0
        if record is None:
            record = self.records[p.label] = Record(now, p.tag, p.sender)
            if behind:  # it leaves its stamps all the same
                record.majority = [1, 1]
            elif self.named < 0 or serial_distance(p.label, self.named) > 0:
                self.named = p.label
        if record.tag != p.tag:
            self.errors.append(
                f"rank {self.rank} and rank {p.sender} disagree on op {step_of(p.label)}.{p.label & 1023}"
            )
            return
        hint = False
        if p.sender not in record.heard:
            record.heard[p.sender] = now
            heard = sum(r in record.heard for r in self.membership.live)
            need = majority(len(self.membership.live) + 1)
            for own in range(2):
                if not record.majority[own] and heard + 1 - own >= need:
                    record.majority[own] = now
            hint = True
        if p.abstain:
            record.abstained.add(p.sender)
        if p.late:
            record.begun.setdefault(p.sender, now)
            record.stayed_out.add(p.sender)
        if p.kind in ("contribution", "again"):
            record.begun.setdefault(p.sender, now)
            op = self.ops.get(p.label)
            if behind or (op is not None and op.sealed):
                record.late = True
            else:
                record.rows[p.sender] += rows
                record.progress += rows
            if p.last:
                record.contributed.setdefault(p.sender, now)
        elif p.kind in ("result", "answer"):
            if behind:
                record.late = True
            else:
                record.results[p.sender] += rows
            if p.last and p.kind == "result":
                record.published.setdefault(p.sender, now)
        if hint or p.last or p.kind in ("ready", "answer", "again"):
            self.wake()

    def wake(self, first: Any = None) -> None:
        """The transport thread runs soon, unless it is stopped."""
        if first is not None:
            self.inbox.append(first)
        if not self.next_turn:
            self.next_turn = 1
            self.world.at(self.world.now + self.plan.run_queue(self), self._turn)

    # -- transport ---------------------------------------------------------------------------------------------------

    def _stamp(self, p: Packets) -> None:
        """Marks and advertisements as they are when a packet leaves."""
        p.contributed, p.published = self.mark_c, self.mark_p
        if p.last:
            if p.kind == "contribution" and serial_distance(p.label, p.contributed) > 0:
                p.contributed = p.label
            if p.kind == "result" and self._published_before(p.label):
                p.published = p.label
        p.newest = self._newest()
        p.deadline = self.deadlines.advertised

    def _published_before(self, label: int) -> bool:
        return all(op.published for other, op in self.ops.items() if serial_distance(other, label) < 0)

    def _newest(self) -> int:
        return max((op.place.label for op in self.ops.values() if op.launched), default=self.mark_c)

    def _control(self, kind: str, to: list[int], label: int, tag: int, **more: Any) -> None:
        for peer in to:
            p = Packets(kind, self.rank, peer, label, tag, **more)
            self._stamp(p)
            self.link.control(p)

    def _turn(self) -> None:
        self.next_turn = 0
        if self.dead or self.stopped:
            return
        now = self.world.now
        if self.rung:
            self.overtime.woke(now - self.rung)
            self.rung = 0
        if now - self.last_turn > _STOPPED:
            self.membership.woke(step_of(self.sequence.upcoming))
        self.last_turn = now
        while self.inbox:
            self.inbox.pop(0)()
        while self.named >= 0 and serial_distance(self.named, self.sequence.next_label) >= 0:
            if step_of(self.sequence.next_label) - step_of(self.base) >= RING_STEPS:
                break
            place = self.sequence.predict()
            if place is None:
                break
            self.ops[place.label] = SimOp(place)
        if self.looked_at != (self.newest_heard, self.sequence.upcoming):
            self.looked_at = (self.newest_heard, self.sequence.upcoming)
            self._look()
        for rank in self.membership.contribution.suspects:
            if self.peers[rank].newest >= 0:
                self.membership.heard(rank, step_of(self.peers[rank].newest))
        holding = self.holding or self.membership.holding(now)
        stood, self.standing = self.standing, bool(holding)
        looks = [now + 100 * MS]
        for op in list(self.ops.values()):
            if (holding or stood) and not op.finished:
                op.held = now
                if op.sealed:
                    op.result_clock = Extension()
                else:
                    op.start, op.own_clock = 0, Extension()
            if not holding:
                self._start(op, now)
            self._forgive(op.place.label, op.start)
            if op.launched and not op.encoded:
                self._contribute(op, now)
            looks.append(self._average(op, now))
            looks.append(self._collect(op, now))
            if op.encoded and not op.finished:
                looks.append(self._remind(op, now))
        self._release()
        again = max(min(t for t in looks if t), now + 1000)
        self.alarm = again
        self.world.at(again, lambda: self._alarmed(again))

    def _alarmed(self, when: int) -> None:
        if self.alarm == when and not self.next_turn:
            self.rung = when
            self.wake()

    def _look(self) -> None:
        rows = self.sequence.op_rows
        self.steps = Steps(RING_STEPS * max(1, sum(rows)) + 1)
        live = [self.peers[p].newest for p in self.membership.live if self.peers[p].newest >= 0]
        self.steps.look(self.sequence.upcoming, live, rows)

    def _start(self, op: SimOp, now: int) -> None:
        if op.start:
            return
        record = self.records.get(op.place.label)
        seen = record.majority if record is not None else [0, 0]
        op.start = stage_start(
            heard_fewer=seen[0],
            heard_need=seen[1],
            alone=majority(len(self.membership.live) + 1) <= 1,
            launched=op.launched,
            start_max=self.deadlines.start_max,
        )
        op.start = 0 if op.start > now else max(op.start, op.held if op.start else 0)
        if op.launched and not (op.overtaken or op.encoded):
            owners = self.membership.owners
            if owners and all(self._marked(p, "published", op) and self._marked(p, "contributed", op) for p in owners):
                op.start, op.overtaken = op.start or max(1, now - 4 * self.config.stage_max), True

    def _marked(self, rank: int, name: str, op: SimOp) -> bool:
        mark = getattr(self.peers[rank], name)
        return mark >= 0 and serial_distance(mark, op.place.label) >= 0

    def _heard(self, peers: list[int], step: int) -> list[int]:
        return [
            self.peers[p].deadline
            for p in peers
            if self.peers[p].newest >= 0 and step_distance(step, step_of(self.peers[p].newest)) <= 2
        ]

    def _d1(self, op: SimOp) -> int:
        return self.deadlines.applied(self._flow(op), self._heard(self.membership.live, op.place.step))

    def _flow(self, op: SimOp) -> int:
        return int(op.place.placement.counts.max()) * self._row_bytes(op)

    def _row_bytes(self, op: SimOp) -> int:
        return op.place.layout.shape.codes + HEADER_BYTES

    def _flow_to(self, op: SimOp, kind: str, to: int, rows: int, until: int, done: Any) -> None:
        left, bursts = rows, BURSTS
        peer, label = self.peers[to], op.place.label

        def published() -> bool:  # an owner that has published an op takes no more rows for it
            return peer.published >= 0 and serial_distance(peer.published, label) >= 0

        over = published if kind == "contribution" else None
        if min(self.world.speed[self.rank], self.world.speed[to]) < 1:
            bursts = -(-rows // BURST_ROWS)  # a slow link shows every burst
        for i in range(bursts):
            part = left // (bursts - i)
            left -= part
            if part:
                size = part * (self._row_bytes(op) + 42)
                last = left == 0
                self.link.submit(
                    Packets(kind, self.rank, to, op.place.label, op.place.layout.tag, part, rows, size, last, until,
                            done=done if last else None, over=over)
                )  # fmt: skip

    def _contribute(self, op: SimOp, now: int) -> None:
        label = op.place.label
        op.encoded = True
        late = op.overtaken or (op.sealed and op.start > 0 and now > op.start + self._d1(op))
        if op.silent or late:
            self.mark_c = label
            said = {"abstain": True} if op.silent else {"late": True}
            self._control("ready", self.membership.peers, label, op.place.layout.tag, **said)
            return
        op.own_present, op.own_in = not op.sealed, now
        self.self_misses = 0
        counts, peers = op.place.placement.counts, [p for p in self.membership.peers if p not in self.membership.gone]
        left = [len(peers)]

        def done() -> None:
            left[0] -= 1
            if not left[0] and serial_distance(label, self.mark_c) > 0:
                self.mark_c = label

        until = (op.start or now) + self.config.stage_max
        for peer in peers:
            self._flow_to(op, "contribution", peer, int(counts[peer]), until, done)
        if not peers:
            self.mark_c = label

    def _average(self, op: SimOp, now: int) -> int:
        if op.sealed:
            return 0
        record = self.records.get(op.place.label)
        if record is not None and record.tag != op.place.layout.tag and not op.launched:
            return 0
        if op.start and not op.own_clock.due:
            op.own_clock.begin(op.start, self._d1(op), self.config.stage_max, LEAST_STEP)
        seen = _First(self, op, record)
        due, again, _ = decide(seen, op.own_clock, op.own_quiet, now, self.deadlines.quiet, overtime=self.overtime)
        if due is None:
            return again
        self.overtime.charge(op.own_clock, now)
        op.early |= due == "quiet"
        op.why.append(due)
        op.sealed = now
        own = int(op.place.placement.counts[self.rank])
        summed = record.rows if record is not None else Counter[int]()
        if due == "deadline":
            live = self.membership.live
            flows = [(summed[p], own) for p in live if not self._marked(p, "contributed", op)]
            op.transfer_cut, op.lost_1 = cut(now - op.start, flows)
        abstained = record.abstained if record is not None else set()
        out = abstained | self.membership.gone
        for p in self.membership.peers:
            if p not in out:
                op.expected += own
                op.missing_rows += own - summed[p]
                op.missing_of[p] += own - summed[p]
        absent = {p for p in self.membership.peers if not summed[p] and p not in out}
        self.suspected += len(
            self.membership.observe_contributions(
                absent, op.place.label, in_step=self.steps.in_step and not op.overtaken, step=op.place.step
            )
        )
        self.self_misses = self.self_misses + 1 if not op.encoded else 0
        peers = [p for p in self.membership.peers if p not in self.membership.gone]
        left = [len(peers)]

        def done() -> None:
            left[0] -= 1
            if not left[0]:
                op.published = True
                self._advance()
                self.wake()

        if not peers or not (op.own_present or summed):
            op.published = True
            self._advance()
        else:
            for peer in peers:
                until = now + self.deadlines.worth_sending(self._flow(op))
                self._flow_to(op, "result", peer, own, until, done)
        return 0

    def _advance(self) -> None:
        for op in self.ops.values():
            if not op.published:
                return
            if serial_distance(op.place.label, self.mark_p) > 0:
                self.mark_p = op.place.label

    def _collect(self, op: SimOp, now: int) -> int:
        if op.finished or not op.launched or not op.encoded or not op.sealed:
            return 0
        record = self.records.get(op.place.label)
        if op.start and not op.result_clock.due:
            flow, most = self._flow(op), self.config.stage_max
            length = self.deadlines.receiver(flow, self._heard(self.membership.owners, op.place.step))
            if op.launched:
                length = self.deadlines.hurried(length, flow, op.start - op.launched)
            op.result_clock.begin(op.start, length, 2 * most, LEAST_STEP)
        seen = _Second(self, op, record)
        quiet = self.deadlines.quiet
        due, again, _ = decide(seen, op.result_clock, op.result_quiet, now, quiet, op.launched, self.overtime)
        if due is None:
            return again
        self.overtime.charge(op.result_clock, now)
        op.early |= due == "quiet"
        op.why.append(due)
        op.finished = now
        counts = op.place.placement.counts
        got = record.results if record is not None else Counter[int]()
        for p in self.membership.peers:
            if p not in self.membership.gone:
                op.expected += int(counts[p])
                op.missing_results += int(counts[p]) - got[p]
                op.missing_of[p] += int(counts[p]) - got[p]
        if due == "deadline":
            owners = self.membership.owners
            flows = [(got[p], int(counts[p])) for p in owners if not self._marked(p, "published", op)]
            op.results_cut, op.lost_2 = cut(now - op.sealed, flows)
        absent = {p for p in self.membership.peers if not got[p] and p not in self.membership.gone}
        in_step = self.steps.in_step and not op.overtaken
        self.suspected += len(
            self.membership.observe_results(absent, op.place.label, in_step=in_step, step=op.place.step)
        )
        self._note(op, record, due, in_step)
        self.sizes[self._flow(op)] += 1
        late = op.launched > op.own_clock.due > 0
        self.log.append(
            Over(op.place.step, op.place.index, op.launched, now, op.expected, op.missing_rows, op.missing_results,
                 tuple(op.why), op.own_clock.due - op.start, late, op.missing_of)
        )  # fmt: skip
        self.done_in_step += 1
        if self.done_in_step == self.in_step_ops:
            self.world.at(now, self._next_step)
        return 0

    def warming(self, op: SimOp) -> bool:
        return self.sizes[self._flow(op)] < WARM_UP_OPS

    def _note(self, op: SimOp, record: Record | None, why: str, in_step: bool) -> None:
        """As ``collective.timing.note`` and ``settle``."""
        if in_step:
            cut = op.lost_1 > 0 or op.lost_2 > 0
            self.deadlines.step(op.place.step, op.launched, self.world.now, last=op.place.layout.last, cut=cut)
            if op.start and self.sequence.stable:
                waited = [p for p in self.membership.live if record is None or p not in record.abstained]
                own = 0 if self.self_misses >= self.config.self_late_after or not op.own_present else op.own_in
                self.pending.append(
                    (
                        op,
                        waited,
                        set(self.membership.contribution.suspects),
                        list(self.membership.owners),
                        own,
                        {"complete": op.finished, "quiet": op.result_quiet.since}.get(why, 0),
                        sum(record.results.values()) if record is not None else 0,
                    )
                )
        while self.pending:
            op, waited, suspects, owners, own, complete, present = self.pending[0]
            if step_distance(step_of(self.sequence.upcoming), op.place.step) < 2:
                break
            self.pending.popleft()
            record = self.records.get(op.place.label)
            if record is None:
                continue
            latest = op.start + self.deadlines.skew_max
            waited += [p for p in suspects if p in record.begun and record.begun[p] <= latest]
            rows = [record.begun[p] for p in waited if p in record.begun] + ([own] if own else [])
            flows = [
                record.contributed[p] - record.begun[p] for p in waited if p in record.contributed and p in record.begun
            ]
            if op.transfer_cut is not None and any(p in record.begun and p not in record.contributed for p in waited):
                flows.append(op.transfer_cut)
            ends = [record.published[p] for p in owners if p in record.published] + ([complete] if complete else [])
            results = [max(0, max(ends) - op.sealed)] if ends else []
            if op.results_cut is not None and any(p not in record.published for p in owners):
                results.append(op.results_cut)
            regretted = record.late or sum(record.results.values()) > present
            self.deadlines.observe(
                Sample(
                    self._flow(op),
                    max(0, max(rows) - op.start) if rows else None,
                    max(flows) if flows else None,
                    max(results, default=None),
                    op.early,
                    op.early and regretted,
                    max(op.lost_1, op.lost_2),
                    op.place.step,
                    max(results) + op.sealed - op.start if results else None,
                    op.start - op.launched if op.launched <= op.start else None,
                )
            )

    def _remind(self, op: SimOp, now: int) -> int:
        """As ``remind``: in a silence, asks those whose marks are missing; the answer carries their marks."""
        record = self.records.get(op.place.label)
        progress = record.progress + sum(record.results.values()) if record is not None else 0

        def missing() -> tuple[list[int], list[int]]:
            name = "published" if op.published else "contributed"
            rows: Counter[int] = Counter()
            if record is not None:
                rows = record.results if op.published else record.rows
            found = [
                p for p in self.membership.peers if p not in self.membership.gone and not self._marked(p, name, op)
            ]
            return [p for p in found if rows[p]], [p for p in found if not rows[p]]

        due = (op.result_clock if op.published else op.own_clock).due
        asked = op.silence.turn(now, progress, due, missing)
        for p in asked:
            self.overtime.asked(p, now, self.heard([p]))
        self._control("ask", asked, op.place.label, op.place.layout.tag)
        return op.silence.again

    def _forgive(self, label: int, start: int) -> None:
        """As ``Transpose._forgive`` with ``timing.on_time``."""
        for op, begun in [(label, start), *self.recent]:
            record = self.records.get(op)
            if not begun or record is None:
                continue
            second = self.deadlines.receiver(self.largest, self._heard(self.membership.owners, step_of(op)))
            for suspicion, stamps, limit in (
                (self.membership.contribution, record.begun, self.deadlines.advertised),
                (self.membership.result, record.published, second),
            ):
                for rank in suspicion.suspects:
                    came = stamps.get(rank, 0)
                    if came and came <= begun + limit and serial_distance(op, suspicion.first_missed(rank)) >= 0:
                        suspicion.clear(rank)

    @property
    def largest(self) -> int:
        return max(self.sizes, default=1)

    def _release(self) -> None:
        while self.ops:
            label, op = next(iter(self.ops.items()))
            if not (op.finished and op.published):
                return
            del self.ops[label]
            self.recent.append((label, op.start))
            self.base = label + 1 if not op.place.layout.last else op_label((op.place.step + 1) & 0x3FFFFF, 0)
            for old in [one for one in self.records if step_distance(op.place.step, step_of(one)) > 3]:
                del self.records[old]

    def _hold(self, p: Packets) -> None:
        if p.kind == "hold":
            self.membership.hold(p.sender, self.world.now)
        else:
            self.membership.unhold(p.sender)

    def _spoke(self, rank: int) -> None:
        self.peers[rank].spoke = self.world.now
        self.overtime.spoke(rank, self.world.now)

    def heard(self, ranks: list[int]) -> int:
        """As ``Job.heard``."""
        return max((max(self.peers[p].last, self.peers[p].spoke) for p in ranks), default=0)

    def repair(self, op: SimOp, half: int, finished: list[int], rows: Any, here: Counter[int], pause: int) -> Any:
        """As ``mend``; ``half`` 0 is that of contributions, ``rows`` what every rank has in it."""
        if op.rounds[half] is None:
            if not finished:
                return False, 0
            cold = self.warming(op)
            whole = op.place.layout.shape.rows if half else rows(0) * len(self.peers)
            repeats = REPEATS_COLD if cold else REPEATS
            seed = op.place.label * 64 + self.rank
            op.rounds[half] = Round(seed, asked_most(whole, cold=cold), repeats, PATIENCE, self.answers)
        round_ = op.rounds[half]
        assert round_ is not None

        def missing(p: int) -> Any:
            return np.arange(rows(p) - here[p])

        for p, places in round_.turn(self.world.now, finished, missing, rows, pause):
            self._control("repair", [p], op.place.label, op.place.layout.tag, places=len(places), first=not half)
        return round_.open, round_.look

    def _answer(self, p: Packets) -> None:
        op = self.ops.get(p.label)
        if p.first:
            if op is not None and op.own_in:
                size = p.places * self._row_bytes(op)
                self.link.submit(Packets("again", self.rank, p.sender, p.label, p.tag, p.places, p.places, size, False))
            return
        if serial_distance(p.label, self.mark_p) <= 0 or (op is not None and op.published):
            size = p.places * 1514
            self.link.submit(Packets("answer", self.rank, p.sender, p.label, p.tag, p.places, p.places, size, False))

    # -- training ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts the training thread."""
        self.world.at(self.world.now, self._compute)

    def _next_step(self) -> None:
        if self.dead:
            return
        self.step += 1
        self._compute()

    def _compute(self) -> None:
        if self.dead or self.plan.over(self):
            return
        if self.stopped:
            self.world.at(self.world.now + 5 * MS, self._compute)
            return
        pause = self.plan.pause(self)
        if pause:
            self._pause(self.world.now + pause)
            return
        self._look()
        buckets = self.plan.buckets(self)
        self.done_in_step, self.in_step_ops = 0, len(buckets)
        behind = self.steps.behind > 0
        if self.steps.lost:
            self._jump()
            behind = False
        self.behind_steps += behind
        whole = 0 if behind else self.plan.compute(self)
        shares = [0.4 + 0.6 * i / (len(buckets) - 1) if len(buckets) > 1 else 1.0 for i in range(len(buckets))]
        for i, (bucket, share) in enumerate(zip(buckets, shares, strict=True)):
            self._launch_at(self.world.now + int(whole * share), bucket, i == len(buckets) - 1, behind)

    def _launch_at(self, when: int, bucket: tuple[int, int], last: bool, silent: bool) -> None:
        def launch() -> None:
            if self.dead:
                return
            if self.stopped:
                self.world.at(self.world.now + 5 * MS, launch)
                return
            self._launch(bucket, last, silent)

        self.world.at(when, launch)

    def _launch(self, bucket: tuple[int, int], last: bool, silent: bool) -> None:
        index, numel = bucket
        key = (index, numel, last)
        if key not in self.layouts:
            tag = layout_tag(
                bucket=index, numel=numel, dtype="float32", chunk=0, world_size=self.world.ranks, width=1408, mode=1
            )
            self.layouts[key] = Layout((index, numel, 0, 1), shape_for(numel, 1408), tag, last)
        if self.holding and last:
            self.holding = False
            self._control("unhold", self.membership.peers, self.sequence.upcoming, 0)
        place, wrong = self.sequence.assign(self.layouts[key])
        for old in wrong:
            self.ops.pop(old.label, None)
        op = self.ops.setdefault(place.label, SimOp(place))
        op.launched, op.silent = self.world.now, silent
        record = self.records.get(place.label)
        if record is not None and record.tag != place.layout.tag:
            self.errors.append(
                f"rank {self.rank} and rank {record.first_sender} disagree on op {place.step}.{place.index}"
            )
        self.wake()

    def _jump(self) -> None:
        """To where the first live peer says that the next step begins (clock-20)."""
        donor = self.plan.donor(self)
        to = donor.sequence.position()
        if step_distance(to.step, step_of(self.sequence.upcoming)) <= 0:
            return
        self.ops.clear()
        self.recent.clear()
        self.pending.clear()
        self.sequence.jump(to)
        self.mark_c = self.mark_p = op_label(to.step, 0) - 1 & 0xFFFFFFFF
        self.base = op_label(to.step, 0)
        self.named = -1
        self.membership.woke(to.step)
        self.jumps += 1
        self.step = to.step

    def _pause(self, until: int) -> None:
        """Between two steps, alive: says so every 50 ms until it has launched a whole step (clock-16)."""
        self.holding = True
        self.world.at(until, self._compute)
        self._say_hold()

    def _say_hold(self) -> None:
        if self.holding and not self.dead:
            self._control("hold", self.membership.peers, self.sequence.upcoming, 0)
            self.world.at(self.world.now + HOLD_EVERY, self._say_hold)

    def stop(self, length: int) -> None:
        """SIGSTOP for ``length`` ns."""
        self.stopped = True

        def go_on() -> None:
            self.stopped, self.next_turn = False, 0
            self.wake()

        self.world.at(self.world.now + length, go_on)

    def die(self) -> None:
        """Nothing of it is left, its kernel part included."""
        self.dead = self.link.dead = True


class _First:
    """The owner's view of the first half."""

    def __init__(self, node: Node, op: SimOp, record: Record | None) -> None:
        self.node, self.op, self.record = node, op, record
        self.own_in = op.encoded or node.self_misses >= node.config.self_late_after
        self.own = int(op.place.placement.counts[node.rank])

    @property
    def progress(self) -> int:
        return self.record.progress if self.record is not None else 0

    @property
    def left(self) -> int:
        waited = [p for p in self.node.membership.live if self.record is None or p not in self.record.abstained]
        return self.own * len(waited) - self.progress

    def complete(self) -> bool:
        if not self.own_in:
            return False
        live = self.node.membership.live
        return not live or (self.record is not None and all(self.record.rows[p] >= self.own for p in live))

    def finished(self) -> bool:
        return self.own_in and all(self._has_finished(p) for p in self.node.membership.live)

    def _has_finished(self, p: int) -> bool:
        return self.node._marked(p, "contributed", self.op) or (self.record is not None and p in self.record.abstained)

    def heard(self) -> int:
        return self.node.heard([p for p in self.node.membership.live if not self._has_finished(p)])

    def repair(self, now: int, *, late: bool) -> Repair[None]:
        node, record = self.node, self.record
        if self.op.overtaken or record is None:
            return Repair()
        out = record.abstained | record.stayed_out
        finished = [p for p in node.membership.live if p not in out and node._marked(p, "contributed", self.op)]
        return Repair(*node.repair(self.op, 0, finished, lambda _: self.own, record.rows, node.deadlines.quiet))

    def last_call(self, now: int) -> int:
        return 0


class _Second:
    """A receiver's view of the second half."""

    def __init__(self, node: Node, op: SimOp, record: Record | None) -> None:
        self.node, self.op, self.record = node, op, record
        self.counts = op.place.placement.counts
        self.progress = sum(record.results.values()) if record is not None else 0

    @property
    def left(self) -> int:
        return int(sum(self.counts[p] for p in self.node.membership.owners)) - self.progress

    def complete(self) -> bool:
        owners = self.node.membership.owners
        return not owners or (self.record is not None and all(self.record.results[p] >= self.counts[p] for p in owners))

    def finished(self) -> bool:
        return all(self.node._marked(p, "published", self.op) for p in self.node.membership.owners)

    def heard(self) -> int:
        return self.node.heard(
            [p for p in self.node.membership.owners if not self.node._marked(p, "published", self.op)]
        )

    def repair(self, now: int, *, late: bool) -> Repair[None]:
        node, op = self.node, self.op
        if op.overtaken:
            return Repair()
        finished = [p for p in node.membership.owners if node._marked(p, "published", op)]
        here = self.record.results if self.record is not None else Counter[int]()
        pause = 0 if late else node.deadlines.quiet
        return Repair(*node.repair(op, 1, finished, lambda p: int(self.counts[p]), here, pause))

    def last_call(self, now: int) -> int:
        round_ = self.op.rounds[1]
        until = self.op.launched + 10 * MS
        return until if round_ is not None and round_.open and now < until else 0
