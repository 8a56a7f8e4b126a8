"""Which peers the packets to a group reach: tried, asked and judged, in bounded time. Pure; nothing here sends.

Whether a fabric delivers multicast cannot be told from outside: a bridge without a querier forgets its members after
minutes, a storm control drops most of it, and one port may be served and another not. So every rank that would like
to send to the group tries it in rounds: ``ROUND`` small packets to the group, then a question to every peer over the
way that is known to work; who was asked answers which of the last 64 it has heard. Questions are repeated, so that
lost packets cost time and no truth. What a peer has heard decides for this rank's packets alone: a fabric that is
good in one direction is used in that one.

Later rounds are held now and then, since a fabric may change. A single bad one changes nothing but is repeated at
once. Silence (a rank that is stopped, or gone) says nothing about the fabric: what was known stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tailbound.transport.backoff import Backoff, Policy
from tailbound.transport.config import MS
from tailbound.wire.schema import serial_distance

#: Packets of a round, what must be heard of them, how many leave at a time (each time wakes a thread on every rank, and
#: the ranks have something to compute), and ns between.
ROUND, ENOUGH, VOLLEY, GAP = 16, 12, 4, 4 * MS
#: Questions to a peer in a round.
QUESTIONS = Policy(50 * MS, 50 * MS, times=6)
#: ns from one good round to the next with up to so many peers, and in proportion with more, since a rank hears the
#: packets of all; and how rounds are repeated that were bad.
FEW = 8
GOOD, BAD = 5_000 * MS, Policy(250 * MS, 60_000 * MS)
#: Bad rounds running that take a peer off.
SURE = 2
#: Packets of a sender that are remembered.
WINDOW = 64


class Say(NamedTuple):
    """What to send: a ``try`` to the group, or a ``question`` to ``rank``, both with the newest packet's number."""

    kind: Literal["try", "question"]
    rank: int
    number: int


@dataclass
class _Peer:
    reached: bool = False
    bad: int = 0
    question: Backoff = field(default_factory=lambda: Backoff(QUESTIONS))
    answered: bool = False


class Reach:
    """What one rank knows of its own packets to the group.

    Args:
        peers: ranks that they are for.

    Attributes:
        rounds: that have ended.
    """

    def __init__(self, peers: Iterable[int]) -> None:
        self._peers = {rank: _Peer() for rank in peers}
        self._number = 0  # of the newest packet
        self._left = 0  # packets that this round has still to send
        self._asking = False
        self._next = Backoff(BAD, 1)  # when to send the next packets
        self._of: tuple[int, ...] = ()  # who the round is about
        self.rounds = 0

    @property
    def decided(self) -> bool:
        """Whether there has been a whole round."""
        return self.rounds > 0

    def missing(self, ranks: Collection[int]) -> list[int]:
        """Those of ``ranks`` that the group is not known to reach."""
        return [rank for rank in ranks if not self._peers[rank].reached]

    @property
    def look(self) -> int:
        """When to call ``turn`` again."""
        if self._asking:
            return min(self._peers[rank].question.due for rank in self._of if not self._peers[rank].answered)
        return self._next.due

    def turn(self, now: int, live: Collection[int]) -> list[Say]:
        """What to send now, with ``live`` peers to be reached; call it at ``look``, and earlier at will."""
        if self._asking:
            return self._ask(now)
        if now < self._next.due or not live:
            return []
        if not self._left:
            self._left, self._of = ROUND, tuple(live)
            for rank in self._of:
                peer = self._peers[rank]
                peer.answered = False
        self._left -= VOLLEY
        numbers = [(self._number + 1 + i) & 0xFFFFFFFF for i in range(VOLLEY)]
        self._number = numbers[-1]
        self._next.due = now + GAP
        if not self._left:
            self._asking = True
            for rank in self._of:
                self._peers[rank].question = Backoff(QUESTIONS, self._next.due)
        return [Say("try", -1, number) for number in numbers]

    def _ask(self, now: int) -> list[Say]:
        out = []
        for rank in self._of:
            peer = self._peers[rank]
            if peer.answered or now < peer.question.due:
                continue
            if peer.question.over:
                peer.answered = True  # what was known stays
                continue
            peer.question.ask(now)
            out.append(Say("question", rank, self._number))
        self._end(now)
        return out

    def answer(self, rank: int, number: int, heard: int, now: int) -> None:
        """``rank`` says which packets it has heard: bit i of ``heard`` stands for packet ``number`` - i."""
        peer = self._peers.get(rank)
        if peer is None or not self._asking or peer.answered or number != self._number or rank not in self._of:
            return
        peer.answered = True
        if (heard & ((1 << ROUND) - 1)).bit_count() >= ENOUGH:
            peer.reached, peer.bad = True, 0
        else:
            peer.bad += 1
            peer.reached &= peer.bad < SURE
        self._end(now)

    def hurry(self, now: int) -> None:
        """Something has changed: the next round is to begin soon."""
        self._next.asked = 0
        if not self._asking and not self._left:
            self._next.due = min(self._next.due, now)

    def _end(self, now: int) -> None:
        """Ends the round if nobody is to be heard any more."""
        if not all(self._peers[rank].answered for rank in self._of):
            return
        self._asking = False
        self.rounds += 1
        doubtful = [rank for rank in self._of if self._peers[rank].reached and self._peers[rank].bad]
        if doubtful:
            self._next = Backoff(BAD, now + GAP)
        elif self.missing(self._of):
            self._next.ask(now)
        else:
            self._next = Backoff(BAD, now + GOOD * max(FEW, len(self._of)) // FEW)


class Ears:
    """What has been heard of every sender's packets to the group."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[int, int]] = {}  # by sender: newest number, bits

    def hear(self, sender: int, number: int) -> None:
        """Packet ``number`` of ``sender`` has come."""
        newest, bits = self._heard.get(sender, (number, 0))
        ahead = serial_distance(number, newest)
        if ahead > 0:
            bits = bits << ahead if ahead < WINDOW else 0
            newest = number
        behind = serial_distance(newest, number)
        if behind < WINDOW:
            bits |= 1 << behind
        self._heard[sender] = newest, bits & (1 << WINDOW) - 1

    def answer(self, sender: int, number: int) -> int:
        """Which of the last 64 packets up to ``number`` have come: bit i for ``number`` - i."""
        newest, bits = self._heard.get(sender, (number, 0))
        ahead = serial_distance(number, newest)
        if abs(ahead) >= WINDOW:
            return 0
        return bits << ahead & (1 << WINDOW) - 1 if ahead >= 0 else bits >> -ahead
