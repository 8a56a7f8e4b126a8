"""Owner maps: who is late, MAP packets, and which map the kernel takes (clock-22).

``transport.agreement`` says what the map should be and brings all ranks to the same one, and ``transport.sequence``
places ops by it. This file tells them what has been seen, and carries out what they decide.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Mapping

from tailbound.collective.alerts import Alerts
from tailbound.collective.job import Job
from tailbound.collective.op import Op
from tailbound.collective.window import Window
from tailbound.transport.agreement import Agreement, Lateness, Message, Shares, decode_map, encode_map
from tailbound.transport.backoff import Backoff, Policy
from tailbound.transport.config import MS
from tailbound.transport.keys import EPOCH_STEPS, WORDS_APART
from tailbound.transport.sequence import REMEMBERED, Position
from tailbound.transport.steps import step_distance, step_of
from tailbound.wire.schema import MAX_RANKS, OP_INDEX_BITS, OP_STEPS, TIME_UNIT_US, PacketType, op_label, op_slot

#: What peers know of maps is looked at so often while nothing is on its way.
_IDLE = 10 * MS
_TIME_UNIT = TIME_UNIT_US * 1000
#: Ops and steps that follow each other faster than this are not looked at one by one.
_APART = 20 * MS
#: All should have heard of a map this long before it begins, in so many steps at least and at most.
_NOTICE, _LEAD_LEAST, _LEAD_MOST = 50 * MS, 3, 64
#: What is kept for long is dated anew after so many steps, before step numbers turn over.
_AGE_EVERY = 1 << 10

#: How a switch that is silent is tried again.
RESTS = Policy(5_000 * MS, 320_000 * MS)


class Maps:
    """The owner maps of one rank.

    Args:
        job: of the rank.
        owners_least: so many ranks have to own rows, since there is no room for a larger share.
        outside: this rank has come back and not entered yet (``comeback``).
    """

    def __init__(self, job: Job, owners_least: int, *, outside: bool) -> None:
        self._job, self._ranks = job, tuple(range(job.ranks))
        first = job.owners(self._ranks, switched=True)
        self.agreement = Agreement(
            job.rank, job.ranks, first, job.membership.quorum, job.config.first_step, job.config.width
        )
        self.shares = Shares(job.ranks, owners_least)
        states = job.records.peer_states  # columns: a field of a record takes five times as long to read
        self._cookies, self._maps_known = states["cookie"], states["map_known"]
        self._late, self._newest = states["lateness"], states["newest"]
        self._lateness = Lateness()
        self._paces: deque[int] = deque(maxlen=16)
        self._step = self._aged = job.config.first_step
        self._again = self._due = 0
        self._observed = self._wished = -_APART
        self._alerts = Alerts(job, job.accounts.ledger, job.events)
        self._shown = job.config.first_step  # with which the newest map begins that the kernel knows
        self._turn_asked = 0  # turns of keys that another rank has asked for
        self.outside = outside
        self.fallback = Fallback(job.config.suspect_after)

    def adopt(self, to: Position, window: Window) -> None:
        """Goes on with another rank's maps, where the sequence has jumped to; no ops are in flight."""
        self.outside = False
        self.agreement.adopt(to.agreed)
        self.agreement.age(to.step)
        self._step = self._aged = to.step
        self._change(window)

    def receive(self, sender: int, body: bytes) -> None:
        """Takes the body of a MAP packet of another rank."""
        job = self._job
        if self.outside:  # it is told where it enters
            return
        message = decode_map(body, job.world, job.switch)
        if message is None:
            job.voice.control_refused += 1
            return
        self._turn_asked = message.turns or self._turn_asked
        self._foresee(max((each.map.turns for each in message.maps), default=0))  # before it is acknowledged
        self.agreement.receive(message, sender, self._alive(), job.now())
        self._again = 0

    def learn(self, op: Op) -> None:
        """Learns own lateness from an op that is over."""
        job, launch = self._job, op.launch
        now = job.now()
        if now - self._observed < _APART:
            return
        self._observed = now
        if (
            launch is None
            or op.silent
            or op.cold
            or op.held
            or op.overtaken
            or not job.deadlines.heard_of(op.flow_bytes)
        ):
            return
        record = job.records.of(op.label)
        if record is None:
            return
        opened, first = int(record["opened_ns"]), op_slot(op.label) * MAX_RANKS
        heard, came = record["heard"].tolist(), job.records.arrivals[first : first + job.ranks]["first_us"].tolist()
        here = [p for p in job.membership.live if came[p] and heard[p >> 6] >> (p & 63) & 1]
        began = [opened + 1000 * (came[p] - 1) for p in here]
        self._lateness.add(launch.launched, began)
        job.head.lateness = min(0xFFFF, self._lateness.value // _TIME_UNIT)
        self._paces.append(job.now() - max(launch.launched, op.start))

    def poll(self, now: int, window: Window) -> int:
        """Works on everything about maps, ``window`` follows; returns when to look again (0: on arrival)."""
        job, ops = self._job, window.ops
        if job.ranks == 1:
            return 0
        step = job.sequence.upcoming >> OP_INDEX_BITS
        if step != self._step:
            self._step = step
            if step_distance(step, self._aged) >= _AGE_EVERY:
                self._aged = step
                self._age(step, ops)
            if now - self._wished >= _APART:
                self._wished, self._again = now, 0
                lateness = self._lateness_of_all()
                self._alerts.check(step, lateness, self._pace(), now)
                if job.keys is not None:
                    self._alerts.look_for_forged(step, job.keys.turns, now)
                self._wish(step, lateness, now)
            if step_distance(self._shown, step) > -OP_STEPS:  # a change of maps lies in what is in flight, or ahead
                self._show(ops)
        if now >= self._again:
            for peer, message in self.agreement.poll(now, self._next_beginning, self._alive(), self._known_by_peers()):
                self._send(peer, message)
            if self.agreement.known != job.sequence.newest_map:
                self._change(window)
            due = self.agreement.due()
            self._again = max(now + MS, due) if due else now + _IDLE
            self._due = self._again if due else 0
        return self._due

    def _next_beginning(self) -> int:
        """The step that a map begins with which is settled now: some after the newest that a live rank has named."""
        alive = self._alive()
        ahead = [step_distance(step_of(self._newest.item(p)), self._step) for p in self._known_by_peers() if p in alive]
        notice = -(-_NOTICE // (self._alerts.step_time or _NOTICE))
        return self._step + max([0, *ahead]) + max(_LEAD_LEAST, min(_LEAD_MOST, notice))

    def _alive(self) -> list[int]:
        """Peers that have to agree."""
        return self._job.membership.alive(self._step)

    def _known_by_peers(self) -> dict[int, int]:
        here, cookie = self._job.membership.here, self._job.cookie
        return {p: self._maps_known.item(p) for p in here if self._cookies.item(p) == cookie}

    def _wish(self, step: int, lateness: dict[int, int], now: int) -> None:
        """Once a step: what the map should be; proposes it if this is the lowest live rank."""
        job, wanted = self._job, self.agreement.wanted
        owners = wanted.owners if job.switch is None else self._ranks
        if job.config.share_rows:
            absent = job.membership.suspects | job.membership.gone
            owners = self.shares.update(lateness, absent, self._pace())
        if job.switch is not None:
            switched = self.fallback.update(job.silent_ops, job.switched(job.sequence.map), now)
            owners = job.owners(owners, switched=switched)
        alive = self._alive()
        if min(alive, default=job.rank) >= job.rank:
            turns = self._turns(wanted.turns, now)
            if job.in_step and self.agreement.propose(owners, step, turns):
                self._foresee(turns)
                job.events.emit("map_proposed", level=logging.INFO, owners=list(owners), step=step)
            return
        if self._tried() and self._alerts.forgeries.ask(now, WORDS_APART):
            self._send(min(alive), Message(wanted.id, turns=wanted.turns + 1))

    def _tried(self) -> bool:
        """Whether the keys in force have been tried too often here, and can be left now."""
        keys = self._job.keys
        return keys is not None and self._alerts.forgeries.passed and keys.may_turn

    def _turns(self, turns: int, now: int) -> int:
        """Turns of keys that the next map is to have: one more where that is due, and all are there who can be."""
        job, keys = self._job, self._job.keys
        if keys is None or turns != keys.turns or not (job.in_step and keys.may_turn):
            return turns
        if job.membership.suspects - job.membership.dead(self._step, EPOCH_STEPS // 2):
            return turns
        due = keys.old or self._tried() or self._turn_asked == turns + 1
        return turns + (due and self._alerts.forgeries.ask(now))

    def _foresee(self, turns: int) -> None:
        if self._job.keys is not None:
            self._job.keys.foresee(turns)

    def _lateness_of_all(self) -> dict[int, int]:
        """Lateness in ns by rank, as each has told it; not of suspects, whom no rank waits for."""
        job, suspects = self._job, self._job.membership.suspects
        told = {p: self._late.item(p) * _TIME_UNIT for p in self._known_by_peers() if p not in suspects}
        return told | {job.rank: self._lateness.value}

    def _pace(self) -> int:
        """What an op takes as a rule, ns; 0: not known yet."""
        return statistics.median_high(self._paces) if self._paces else 0

    def _change(self, window: Window) -> None:
        """Another history of maps is known: places are foretold anew, headers and the kernel follow."""
        job, ops, agreed = self._job, window.ops, self.agreement.agreed
        job.head.map_known = self.agreement.known
        knew = not job.sequence.adrift
        for place in job.sequence.set_maps(agreed):
            window.drop(place)
        if knew and job.sequence.adrift:
            said = (
                f"step {self._step}: owner maps changed more than {REMEMBERED} steps ago, or several times, before "
                "this rank heard of it: where rows go is not known. Use tailbound.torch.batches, or state.catch_up()"
            )
            job.events.emit("map_too_late", reason=said)
        job.store.control["sum_base"] = window.sum_base
        self._show(ops)
        since, newest = agreed[-1]
        self._foresee(newest.turns)
        job.events.emit("map_settled", level=logging.INFO, id=newest.id, since=since, owners=list(newest.owners))

    def _age(self, step: int, ops: Mapping[int, Op]) -> None:
        """Keeps what began long ago from seeming to be still to come, here and in the kernel."""
        job, agreement = self._job, self.agreement
        job.age(step)
        if not agreement.age(step):
            return
        job.sequence.set_maps(agreement.agreed)
        self._show(ops)
        since, newest = agreement.agreed[-1]
        if step_distance(step, since) > 0 and job.rank not in newest.owners:
            # nothing is summed here: what slots say of ops that are long over must not become older either
            job.datapath.source.seal(op_label(step, 0) - 1 & 0xFFFFFFFF, 0, job.store.sum_rows)

    def _show(self, ops: Mapping[int, Op]) -> None:
        """Tells the kernel the maps before and after the next change (the last one, if none is to come).

        Written so that between two writes, too, ops in flight are judged by their own map.
        """
        job, agreed = self._job, self.agreement.agreed
        oldest = step_of(next(iter(ops), job.sequence.upcoming))
        last = len(agreed) - 1
        after = max(1, next((i for i, each in enumerate(agreed) if step_distance(each.since, oldest) > 0), last))
        self._shown = agreed[-1].since
        job.store.control["map_before"] = agreed[after - 1].map.id
        job.store.control["map_since"] = op_label(agreed[min(after, last)].since, 0)
        job.store.control["map_id"] = agreed[min(after, last)].map.id

    def _send(self, peer: int, message: Message) -> None:
        job = self._job
        head = job.header(PacketType.MAP, job.marks.contributed, 0, owner=peer)  # an op that it may name: one begun
        job.tell(peer, head, encode_map(message, job.world))


class Fallback:
    """One rank's wish whether rows go to the switch, or from rank to rank; pure, times in ns.

    A switch that restarts, or that no rank reaches, sends nothing: every op then lasts until its deadline and brings
    nothing. After a few such ops the ranks agree on an owner map without the switch, and try it again after a rest,
    which doubles each time that this was too early. So a switch that is gone for good costs a few ops in ever more
    minutes.

    Args:
        after: ops running without any result that are enough.
    """

    def __init__(self, after: int) -> None:
        self._after = after
        self._rests = Backoff(RESTS)
        self._left, self._before = False, 0

    def update(self, silent_ops: int, switched: bool, now: int) -> bool:
        """Takes the silent ops running, and whether the map in force names the switch.

        Returns:
            Whether rows should go to the switch.
        """
        self._before = min(self._before, silent_ops)
        if self._left and now >= self._rests.due:
            self._left, self._before = False, silent_ops
        elif not self._left and switched and silent_ops - self._before >= self._after:
            if self._rests.asked and now - self._rests.due >= RESTS.wait(self._rests.asked):
                self._rests.asked = 0  # it was not too early
            self._rests.ask(now)
            self._left = True
        return not self._left
