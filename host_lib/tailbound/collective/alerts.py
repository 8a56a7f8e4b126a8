"""Alerts about peers: late ranks, links that lose packets, and the end of both.

All ranks know of a late one what it says itself, so one of them warns, the lowest that is not late, and the late rank
itself; the others note the event at level INFO. Losses are seen by their receiver alone. Beginning and end of an alert
need several observations alike, so nothing flickers; reminders come ever more rarely.
"""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tailbound.collective.speaker import Speaker
from tailbound.collective.timing import WHO_WAITS
from tailbound.datapath.protocol import Datapath
from tailbound.errors import TransportError
from tailbound.observe.events import Events
from tailbound.observe.ledger import Ledger
from tailbound.transport.agreement import late_limit
from tailbound.transport.backoff import Backoff, Policy
from tailbound.transport.config import MS
from tailbound.transport.keys import MOST, Forgeries
from tailbound.transport.steps import step_distance
from tailbound.wire.schema import UNKNOWN_SENDER, Fate, Verdict

Turn = Literal["begins", "lasts", "over"]

#: Steps alike before a rank is called late, and before it is called in time again.
_LATE, _IN_TIME = 8, 8
#: Rows of a window in which loss is measured.
WINDOW = 2000
#: A link that loses a larger share is named; below the other it is well.
NAMED, WELL = 0.02, 0.005
#: A rank that is late is named where that is worth it: by so much, ns, and such a part of a step.
_MATTERS, _OF_A_STEP = 20 * MS, 8
#: ns between two looks at losses.
_LOOK_AT_LOSSES = 500 * MS
#: A rank waits for the interpreter lock for a larger part of the time; below the other it is well. A loop in Python
#: makes it a tenth, and a call that keeps the lock for half of the time a sixth; without them it is a thousandth.
_HELD_UP, _FREE = 1 / 16, 1 / 32
#: What to look at where a way loses packets.
_REMEDY = (
    f"{Fate.LOST.advice}. Between ranks of one host look at processor time and at room for sockets "
    "(stats()['lost_on_arrival'], sysctl net.core.rmem_max)"
)
#: How it is said again that something lasts.
REMINDERS = Policy(30_000 * MS, 600_000 * MS)
#: ns between two looks for what is wrong with the program, or with paths.
LOOK_EVERY = 1_000_000_000


class Alerts:
    """What one rank says in the log of the others, and of itself; it looks once a step."""

    def __init__(self, known: Speaker, ledger: Ledger, events: Events) -> None:
        self._known, self._ledger, self._events = known, ledger, events
        self._late = Episodes(_LATE, _IN_TIME)
        self._losses = Losses(WINDOW)
        self._suspects: frozenset[int] = frozenset()
        self._away = Episodes(1, 1)
        self._looked: tuple[int, int] | None = None  # when, and at which step
        #: ns that a step takes lately; 0: not known yet
        self.step_time = 0
        self._lost = 0  # when losses and the interpreter lock were looked at
        self._held_up, self._locked = 0, Episodes(2, 2)
        self._forged, self._said = 0, Backoff(REMINDERS)
        #: tries at the keys in force
        self.forgeries = Forgeries()

    def check(self, step: int, lateness: Mapping[int, int], pace: int, now: int) -> None:
        """Looks at everybody.

        Args:
            step: own next step.
            lateness: ns by rank, as told by each; the own one among them.
            pace: ns that an op takes as a rule.
            now: CLOCK_MONOTONIC, ns.
        """
        members = self._known.membership
        suspects = members.suspects
        self._time(step, now)
        limit = late_limit(lateness.values(), pace)
        for rank, late in lateness.items():
            if rank not in suspects and rank not in members.gone:  # of these nothing new is known
                so = True if late > limit else False if 2 * late <= limit else None
                if turn := self._late.see(rank, so, now, step):
                    self._say_late(rank, turn, late, step)
        for rank in sorted(self._suspects - suspects - members.gone):
            text = f"rank {rank} is waited for again (step {step})"
            self._events.emit("back", text, level=logging.INFO, back=rank, step=step)
        for rank in self._suspects | suspects:
            turn = self._away.see(rank, rank in suspects and rank not in members.gone, now, step)
            if turn == "lasts":
                self._say_away(rank, step)
        self._suspects = suspects
        if now >= self._lost + _LOOK_AT_LOSSES:
            self._look_at_the_lock(step, now - self._lost, now)
            self._lost = now
            verdicts = zip(self._known.peers, self._known.records.verdicts(self._known.peers), strict=True)
            totals = {peer: self._ledger.lost(peer, counts) for peer, counts in verdicts}
            for loss in self._losses.update(totals, now):
                self._say_loss(*loss, step)

    def _time(self, step: int, now: int) -> None:
        """Follows what a step takes."""
        if self._looked is not None and (steps := step_distance(step, self._looked[1])) > 0:
            took = (now - self._looked[0]) // steps
            self.step_time += (took - self.step_time) // 8 if self.step_time else took
        self._looked = now, step

    def _look_at_the_lock(self, step: int, passed: int, now: int) -> None:
        """Names what no other sign tells: a thread of this process that keeps the GIL holds up all ranks."""
        held_up = self._known.overtime.held_up
        share, self._held_up = (held_up - self._held_up) / passed, held_up
        turn = self._locked.see(None, True if share > _HELD_UP else False if share < _FREE else None, now, step)
        if turn in ("begins", "lasts"):
            text = (
                f"this rank waits for Python's interpreter lock (GIL) {min(share, 1.0):.0%} of the time (step {step}), "
                "and the others wait for this rank. Move what keeps it (a tokenizer, pickle, a metric in C) into "
                "another process, such as a DataLoader's worker, or call hold() around it"
            )
            self._events.emit("held_up", text, share=share, step=step)

    def _say_away(self, rank: int, step: int) -> None:
        steps = step_distance(step, self._away.begun(rank))
        text = (
            f"nobody has waited for rank {rank} for {steps} steps (step {step}). If it lives, its data counts for "
            f"nothing where it comes too late. {WHO_WAITS}"
        )
        self._events.emit("away", text, away=rank, step=step, steps=steps)

    def look_for_forged(self, step: int, epoch: int, now: int) -> None:
        """Each forged packet is a try at a key: says that there are some, ever more rarely, and when it is too many."""
        count = self._known.records.count(UNKNOWN_SENDER, Verdict.FORGED)
        tries = self.forgeries
        if tries.count(count, epoch):
            text = (
                f"{tries.tried} packets without a right tag came while one key was in force (step {step}), more than "
                f"{MOST}: somebody may be trying keys. The next key is asked for before its time; find out who sends "
                "here: docs/security.md"
            )
            self._events.emit("keys_tried", text, level=logging.ERROR, packets=tries.tried, epoch=epoch, step=step)
        if count <= self._forged or now < self._said.due:
            return
        new, self._forged = count - self._forged, count
        self._said.ask(now)
        text = (
            f"{new} packets came without a right tag (step {step}), {count} in this job: they were changed, damaged or "
            "forged on the way, or a rank slept for long. Look for who else sends on this network; docs/security.md"
        )
        self._events.emit("forged", text, packets=new, all=count, step=step)

    def _say_late(self, rank: int, turn: Turn, late: int, step: int) -> None:
        ms = round(late / MS, 1)
        who = "this rank" if rank == self._known.rank else f"rank {rank}"
        steps = step_distance(step, self._late.begun(rank))
        fields: dict[str, Any] = {"late": rank, "ms": ms, "step": step, "steps": steps}
        if turn == "over":
            text = f"{who} is in time again (step {step}, after {steps} steps)"
            self._events.emit("in_time", text, level=logging.INFO, **fields)
            return
        since = f"for {steps} steps now" if turn == "lasts" else "the others do not wait for it beyond their deadlines"
        text = (
            f"{who} is late: its gradients come {ms:g} ms after those of the others (step {step}); {since}. "
            f"{Fate.LATE.advice}"
        )
        warn = self._speaks(rank) and late >= max(_MATTERS, self.step_time // _OF_A_STEP)
        self._events.emit("late", text, level=logging.WARNING if warn else logging.INFO, **fields)

    def _speaks(self, late: int) -> bool:
        """Whether this rank is the one that warns of ``late``."""
        own = self._known.rank
        here = [r for r in (own, *self._known.membership.live) if not self._late.running(r)]
        return late == own or own == min(here, default=-1)

    def _say_loss(self, peer: int | None, turn: Turn, share: float, others: float, step: int) -> None:
        where = "to this rank" if peer is None else f"from rank {peer} to this one"
        fields: dict[str, Any] = {"peer": peer, "share": share, "others": others, "step": step}
        if turn == "over":
            text = f"the way {where} no longer loses packets (step {step})"
            self._events.emit("link_well", text, level=logging.INFO, **fields)
            return
        alike = "from all peers alike" if peer is None else f"{others:.2%} from the others"
        text = f"{share:.1%} of the packets are lost on the way {where} (step {step}), {alike}. {_REMEDY}"
        self._events.emit("link_loses", text, **fields)


class Losses:
    """Loss by peer, as one receiver sees it; the own link told apart. Pure.

    Args:
        window: rows that a peer should have brought until its loss is judged again.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._before: dict[int, tuple[int, int]] = {}
        self._shares: dict[int, float] = {}
        self._episodes = Episodes(begin=2, end=2)

    def update(
        self, totals: Mapping[int, tuple[int, int]], now: int
    ) -> Iterator[tuple[int | None, Turn, float, float]]:
        """Takes by peer (rows expected, rows lost on the way) since the start of the job.

        Yields what is to be said: whose rows get lost (None: those of nearly all peers, so it is the link of this
        rank), the turn, the share in the last window, and the median share of the others.
        """
        fresh = []
        for peer, (expected, lost) in totals.items():
            rows, gone = self._before.setdefault(peer, (0, 0))
            if expected - rows >= self._window:
                self._shares[peer] = (lost - gone) / (expected - rows)
                self._before[peer] = expected, lost
                fresh.append(peer)
        if not fresh:
            return
        middle = statistics.median_low(self._shares.values())
        own = len(self._shares) > 1 and middle > NAMED
        if turn := self._episodes.see(None, _so(middle) if len(self._shares) > 1 else False, now):
            yield None, turn, middle, middle
        for peer in fresh:
            share = self._shares[peer]
            others = [s for p, s in self._shares.items() if p != peer]
            typical = statistics.median_low(others) if others else 0.0
            # where all are lost alike, no single peer is to blame
            so = None if own and share < 2 * middle and not self._episodes.running(peer) else _so(share)
            if turn := self._episodes.see(peer, so, now):
                yield peer, turn, share, typical


def _so(share: float) -> bool | None:
    return True if share > NAMED else False if share < WELL else None


@dataclass
class _Episode:
    alike: int = 0  #: observations, the last ones, that say that it is not as it was
    running: bool = False
    begun: int = 0
    reminder: Backoff = field(default_factory=lambda: Backoff(REMINDERS))


class Episodes:
    """From "is it so now?" to what is worth a line: it begins, it still lasts, it is over; by key. Pure.

    Args:
        begin, end: how many observations alike, one after the other, begin an episode and end it.
    """

    def __init__(self, begin: int, end: int) -> None:
        self._begin, self._end = begin, end
        self._all = defaultdict[int | None, _Episode](_Episode)

    def running(self, key: int | None) -> bool:
        """Whether an episode of ``key`` runs."""
        return self._all[key].running

    def begun(self, key: int | None) -> int:
        """``at`` of the observation with which the last episode of ``key`` began; 0: there was none."""
        return self._all[key].begun

    def see(self, key: int | None, so: bool | None, now: int, at: int = 0) -> Turn | None:
        """Takes one observation; returns what is to be said, if anything.

        Args:
            so: whether it is so; None: neither clearly so nor clearly not.
            now: ns.
            at: what ``begun`` is to say (a step).
        """
        one = self._all[key]
        one.alike = 0 if so is None or so is one.running else one.alike + 1
        if one.alike < (self._end if one.running else self._begin):
            if one.alike or not one.running or now < one.reminder.due:
                return None
            one.reminder.ask(now)
            return "lasts"
        if one.running:
            self._all[key] = _Episode(begun=one.begun)
            return "over"
        self._all[key] = _Episode(running=True, begun=at)
        self._all[key].reminder.ask(now)
        return "begins"


def fault_of(known: Speaker, datapath: Datapath) -> TransportError | None:
    """A fault of the program that receives here, as an error in place of losses for ever; None: there is none.

    To be called now and then (``LOOK_EVERY``).
    """
    control = known.store.control
    if datapath.withdrawn:
        return TransportError(
            f"rank {known.rank}: the program on {datapath.interface} was detached or replaced while this job runs "
            "(`tailbound detach`, `attach --replace`), so that nothing can be received any more: start this rank "
            "again; attach between two jobs"
        )
    if not control["active"][0]:
        return TransportError(
            f"rank {known.rank}: no packets are let in any more: another process has ended this job in its maps, or "
            "the kernel finds no socket of it (in a VRF before Linux 6.6: use the udp datapath). Start it again"
        )
    if known.armed and not control["tagged"][0]:
        return TransportError(
            f"rank {known.rank}: another process has switched the check of tags off while this job runs, so that "
            "packets without the key may have counted: look who may open its maps (docs/security.md)"
        )
    return None
