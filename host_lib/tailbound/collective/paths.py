"""Whether rows still reach the peers, where small packets do: segmentation offload that breaks, an MTU that shrinks.

Where most rows of a sender do not come, op after op, although it has sent them, the receiver sends a HELLO with the
flag COMPLAINT. The sender then tries its way (``trials``), as before the first op. Where single packets arrive and
bursts do not, it sends one by one from then on. Where small packets arrive and those as wide as a row do not, rows of
this job cannot pass any more, so that all ranks end with an error.

A rank also says what its own system refuses to send, and tells the peers that it does (flag ABSTAIN).
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tailbound.collective.speaker import Speaker
from tailbound.collective.trials import ANSWERS, BURST, LIMIT, SMALL, TRIES, WIDE, Trials
from tailbound.errors import TransportError
from tailbound.transport.backoff import Backoff, Policy
from tailbound.transport.config import MS
from tailbound.transport.sender import NO_GSO
from tailbound.wire.schema import MAX_RANKS, Flag, PacketType

#: Tries of which small packets have arrived and wide ones have not, so that it is the MTU.
_WIDE_TRIES = 8
#: How refusals are told of again, and complaints about one peer are repeated.
_LATER = Policy(30_000 * MS, 600_000 * MS)
_COMPLAINTS = Policy(100 * MS, 10_000 * MS)
#: After so long without a complaint the next one is the first.
_WELL = 30_000 * MS
#: A trial tells within so many ns what is wrong, as a rule.
_TOLD = 3_000 * MS
#: ns between two looks at what the system refuses.
_LOOK_EVERY = 200 * MS
#: What to do about what a system refuses to send, by errno.
_REMEDIES = {
    errno.EPERM: "a firewall on this host refuses them (nft list ruleset, iptables -L OUTPUT), or a limit of its "
    "connection tracking",
    errno.EMSGSIZE: "the MTU of {interface} has become smaller than a row: ip link show {interface}",
    errno.ENETUNREACH: "there is no route to them any more: ip route",
    errno.EHOSTUNREACH: "their hosts do not answer at the link: ip neigh, ip route",
    errno.ENETDOWN: "{interface} is down: ip link show {interface}",
}


@dataclass
class _Trial:
    """One that is under way: its number, when it began, and what the peer has told of it."""

    number: int
    begun: int
    tries: Backoff
    told: int = 0
    arrived: int = 0
    answers: int = 0


class Paths:
    """The ways of one rank's rows to its peers.

    Args:
        job: of the rank.
        interface: name of the interface that they leave by.

    Attributes:
        trials: sends and hears tries.
    """

    def __init__(self, job: Speaker, interface: Callable[[], str]) -> None:
        self._job, self._interface = job, interface
        self.trials = Trials(job)
        self._open: dict[int, _Trial] = {}
        self._begun = 1  # trials; that before the first op was the first
        self._plain: set[int] = set()  # destinations without bursts, told of
        self._complaints: dict[int, Backoff] = {}
        self._asked: dict[int, int] = {}  # when peers were asked to try their way ...
        self._unproven: set[int] = set()  # ... and of which no burst has come since
        self._refusals, self._looked, self._errors = 0, 0, Counter[tuple[int, str]]()
        self._said: dict[str, Backoff] = {}
        self._error: TransportError | None = None

    # -- what comes ---------------------------------------------------------------------------------------------------

    def receive(self, head: np.void, body: bytes) -> None:
        """Takes a HELLO packet."""
        peer, flags, now = int(head["sender"]), int(head["flags"]), self._job.now()
        if flags & Flag.STOP:
            self._end(f"rank {peer} says that {self._narrow(int(head['count']))}")
        elif flags & Flag.COMPLAINT:
            self._begin(peer, now)
        elif flags & Flag.ABSTAIN:
            self._job.cannot_send[peer] = now
        else:
            said, trial = self.trials.receive(head, body), self._open.get(peer)
            if said.heard & BURST:
                self._unproven.discard(peer)
            if trial is not None and said.trial == trial.number:
                trial.told |= said.told
                trial.arrived = max(trial.arrived, said.arrived)
                trial.answers += said.answer
                if trial.told & BURST:
                    del self._open[peer]

    def complain(self, peer: int) -> None:
        """Most rows of ``peer`` do not come although it has sent them: it is to try its way here."""
        now = self._job.now()
        due = self._complaints.get(peer)
        if due is None or now > due.due + _WELL:
            due = self._complaints[peer] = Backoff(_COMPLAINTS)
        if now >= due.due:
            due.ask(now)
            self._tell(peer, Flag.COMPLAINT)
            self._job.counters["complaints"] += 1
            if now >= self._asked.get(peer, -_TOLD) + _TOLD:
                self._asked[peer] = now
                self._unproven.add(peer)

    def trying(self) -> bool:
        """Whether a trial, here or of a peer that was asked for one, has still to tell why rows do not come."""
        begun = [trial.begun for trial in self._open.values()] + [self._asked[peer] for peer in self._unproven]
        return any(self._job.now() < each + _TOLD for each in begun)

    def _tell(self, peer: int, flag: Flag, count: int = 0) -> None:
        job = self._job
        job.tell(peer, job.header(PacketType.HELLO, job.marks.contributed, 0, flags=int(flag), count=count))

    # -- what is tried ------------------------------------------------------------------------------------------------

    def poll(self, now: int) -> int:
        """Once a turn: tries what is due; returns when to look again (0: on arrival)."""
        sender = self._job.sender
        if sender.refusals != self._refusals and now >= self._looked + _LOOK_EVERY:
            self._refusals, self._looked = sender.refusals, now
            self._look_at_refusals(now)
        if not sender.plain <= self._plain:
            self._say_plain()
        if not self._open:  # nearly always
            return 0
        for peer, trial in list(self._open.items()):
            if now >= trial.tries.due:
                self._judge(peer, trial, now)
        return min((trial.tries.due for trial in self._open.values()), default=0)

    def check(self, now: int) -> TransportError | None:
        """The error with which the job ends, if it is to end (``alerts``)."""
        return self._error

    def _begin(self, peer: int, now: int) -> None:
        if self._error is None and peer not in self._open and peer in self.trials.peers - self._job.membership.gone:
            self._begun = self._begun % 0xFFFF + 1
            self._open[peer] = _Trial(self._begun, now, Backoff(TRIES, now))

    def _judge(self, peer: int, trial: _Trial, now: int) -> None:
        """Ends a trial by what the peer has told until now, or asks once more."""
        asked, told = trial.tries.asked, trial.told
        refused = self.trials.refused.get(peer) == errno.EMSGSIZE and asked >= 2
        heard = told & SMALL and not trial.arrived and 2 * trial.answers >= asked >= _WIDE_TRIES
        if not told & WIDE and (refused or heard):
            self._narrowed(peer)
        elif told & WIDE and trial.answers >= ANSWERS:
            del self._open[peer]
            self._job.sender.plain.add(peer)
        elif now > trial.begun + LIMIT:  # nothing is known: it may be stopped
            del self._open[peer]
        else:
            trial.tries.ask(now)
            self.trials.ask(peer, trial.number)

    # -- what is said -------------------------------------------------------------------------------------------------

    def _say_plain(self) -> None:
        """Peers have become such that get no bursts."""
        sender = self._job.sender
        for number in [each for each in sender.plain if each in sender.shared]:
            sender.plain.update(sender.shared[number].ranks)
        ranks = sorted(each for each in sender.plain - self._plain if each < MAX_RANKS)
        self._plain |= sender.plain
        interface = self._interface() or "INTERFACE"
        names = ", ".join("the switch" if each == self._job.switch else str(each) for each in ranks)
        kernel = os.uname().release
        text = (
            f"bursts by UDP segmentation offload do not reach rank(s) {names}, single packets do "
            f"(kernel {kernel}, {interface}): packets leave one by one, which takes more processor time. Switch the "
            f"interface's own offload off (ethtool -K {interface} tx-udp-segmentation off) and start this rank again, "
            "or take another kernel (Linux 7.0 to 7.1.4 corrupt such bursts)"
        )
        self._job.events.emit("bursts_lost", text, peers=ranks, kernel=kernel, interface=interface)

    def _narrow(self, peer: int) -> str:
        size = self._job.row_bytes
        return f"packets of {size} bytes, as rows are, no longer reach rank {peer}, and small ones do"

    def _narrowed(self, peer: int) -> None:
        for each in self._job.peers * 3:
            self._tell(each, Flag.STOP, peer)
        self._end(self._narrow(peer))

    def _end(self, what: str) -> None:
        """Rows pass no more, so that nothing would be averaged: the job ends."""
        if self._error is not None:
            return
        self._open.clear()
        interface = self._interface() or "INTERFACE"
        self._error = TransportError(
            f"rank {self._job.rank}: {what}: the MTU of the path has become smaller. Give the path its MTU back, or "
            f"all ranks' interfaces a smaller one (ip link set dev {interface} mtu ...; with xdp: tailbound attach "
            "--mtu ...), and start the job again"
        )

    def _look_at_refusals(self, now: int) -> None:
        """Says what this host's system has refused to send since the last look, and tries what is too long for it."""
        sender = self._job.sender
        found = Counter({(rank, name): n for rank, one in sender.counts.items() for name, n in one.errors.items()})
        for number, shared in sender.shared.items():
            found.update({(number, name): n for name, n in shared.counts.errors.items()})
        new, self._errors = found - self._errors, found
        for name in sorted({name for _, name in new}):
            number = getattr(errno, name, 0)
            ranks = sorted({rank for each, what in new if what == name for rank in sender.ranks_of(each)})
            if number == errno.EMSGSIZE:
                for rank in ranks:
                    self._begin(rank, now)
            if number == errno.ECONNREFUSED or (number in NO_GSO and not sender.plain.isdisjoint(ranks)):
                continue  # of the other side; or told of by itself
            for rank in ranks:
                if rank in self.trials.peers:
                    self._tell(rank, Flag.ABSTAIN)
            said = self._said.setdefault(name, Backoff(_LATER))
            if now < said.due:
                continue
            said.ask(now)
            calls = sum(n for (_, what), n in found.items() if what == name)
            remedy = _REMEDIES.get(number, "look at this host: ip -s link, nft list ruleset")
            text = (
                f"this host refuses to send to rank(s) {', '.join(map(str, ranks))}: {os.strerror(number)} ({name}, "
                f"{calls} times): {remedy.format(interface=self._interface() or 'the interface')}"
            )
            self._job.events.emit("cannot_send", text, errno=name, calls=calls, peers=ranks)
