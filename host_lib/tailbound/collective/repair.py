"""Asking for missing rows and answering (clock-13, clock-23, clock-26): what, when and how much, as pure parts.

Nothing here reads a clock, a map or a socket: times (ns) and what has been seen are arguments.

A rank asks an owner only when its finished mark for the op is in, and only for what is still missing a moment later:
one bitmap and one repeat, and one more of what is left if one of the two was answered in part, or of all if answers
usually come long before the last one is given up. What may be asked of an op is bounded, so is what is spent on
answers, and a rank that misses much waits for a random while first, since then others probably miss the same.

A REPAIR packet asks for rows of one list of an op. Header: ``rows`` of that list, ``row`` the place of the first bit.
Body: a bitmap, most significant bit first; a set bit is a missing row. With ``rows`` 0 it only asks for marks.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import Places
from tailbound.transport.backoff import AnswerTime, Backoff, Policy
from tailbound.transport.config import FLOOR, MS
from tailbound.wire.schema import serial_distance

_NONE: Places = np.zeros(0, np.int64)

#: Part of an op's rows that may be asked for, and part of the pace that answers may take. A queue that overflows drops
#: bursts of 44 rows: ten of them are a twentieth of an op, and rows that arrive come before a short tail.
ASKED, SHARE = 0.25, 0.05
#: So few rows are asked for at once, whatever part of their list they are: a list of one row is lost by one packet, and
#: answers of a few rows are no burst.
FEW = 3
#: How often one asks again without any answer: as a rule, and where everything is repaired (warm-up, cold ops); twice
#: as often in all, where something came and something did not.
REPEATS, REPEATS_COLD = 1, 6
#: Ops of one key that count as its warm-up (clock-26).
WARM_UP_OPS = 20
#: For so long nothing of an answer comes before it counts as lost, at most; at least for the floor of deadlines. Two
#: round trips are far less, but the owner's thread may be coding another op when it is asked.
PATIENCE_MOST = 50 * MS
#: The repeat goes out earlier: after twice as long as answers take, but not before this part of the floor. To ask twice
#: in vain costs a few rows, and to wait for an answer that was lost makes the op one of the slowest.
SOON = 5
#: How often a rank that waits for an answer looks, at least.
LOOK = 1 * MS


def asked_most(rows: int, *, cold: bool) -> int:
    """How many of an op's ``rows`` may be asked for: a quarter, at least one; all in warm-up and of cold ops."""
    return rows if cold else max(1, int(rows * ASKED))


def patience(stage_two: int, floor: int) -> int:
    """How long an answer may take without progress: part of what results take as a rule, D2 of clock-11, in ns."""
    return min(PATIENCE_MOST, max(floor, stage_two // 4))


def thin(places: Places, most: int) -> Places:
    """At most ``most`` of ``places``, spread evenly: a list is in (r, g) order, so no group gains or loses more."""
    if len(places) <= most:
        return places
    return places[np.arange(most) * len(places) // most]


@dataclass
class _Peer:
    due: int  #: when to look next
    question: Backoff
    since: int = 0  #: when it was asked first
    spare: int = 0  #: when it is asked once more, while the last question still waits; 0: it is not
    delayed: bool = False
    places: Places = field(default_factory=lambda: _NONE)
    over: bool = False


class Round:
    """One rank's repair of one half of one op: which rows to ask of whom, and whether an answer is still due.

    Args:
        seed: of the random delay; differs by rank and op.
        most: rows that may be asked for in all (``asked_most``).
        repeats: how often one asks again without an answer.
        patience: ns without progress after which an answer counts as lost.
        answers: learns how long answers take; the repeat waits no longer than it says.
    """

    def __init__(self, seed: int, most: int, repeats: int, patience: int, answers: AnswerTime) -> None:
        self._seed = seed
        self._random: random.Random | None = None  # made when it is needed: that takes longer than a look
        self._answers = answers
        self._left = most
        self._patience, self._look = patience, min(LOOK, patience // 2)
        self._questions = Policy(patience, patience << 3, repeats + 1)  # what has not come by then will not come
        self._peers: dict[int, _Peer] = {}
        self._begun = 0
        self.asked: dict[int, Places] = {}  #: rows asked for, by rank
        self.without: set[int] = set()  #: ranks that have nothing of what is missing, as they say

    @property
    def open(self) -> bool:
        """Whether something is to be asked, or an answer may still come."""
        return any(not peer.over for peer in self._peers.values())

    @property
    def look(self) -> int:
        """When to call ``turn`` again; 0 when nothing is open."""
        return min((peer.due for peer in self._peers.values() if not peer.over), default=0)

    @property
    def last_call(self) -> int:
        """When an op that was launched too late waits no longer (clock-13): one question and its answer after ``turn``.

        Not after the launch: on a starved host coding the own rows alone may take longer than that.
        """
        return self._begun + 2 * self._patience

    def over(self, rank: int) -> bool:
        """Whether ``rank`` has been looked at, and nothing more is asked of it."""
        peer = self._peers.get(rank)
        return peer is not None and peer.over

    def came(self, rank: int, now: int) -> None:
        """All that was asked of ``rank`` is here."""
        if (peer := self._owing(rank)) is not None:
            self._answered(peer, now)

    def gone(self, rank: int) -> None:
        """``rank`` has said that no more of this op will come from it."""
        self.without.add(rank)
        if (peer := self._owing(rank)) is not None:
            peer.over = True

    def turn(
        self,
        now: int,
        finished: Iterable[int],
        missing: Callable[[int], Places],
        rows: Callable[[int], int],
        pause: int,
    ) -> list[tuple[int, Places]]:
        """What to ask for now.

        Args:
            now: the time.
            finished: ranks that have sent all of their rows, are not suspect, and have rows in this op.
            missing: the places in a rank's list that are not here (i64[], rising); only called when it matters.
            rows: rows of a rank's list.
            pause: for so long after the finished mark rows may still be on their way.

        Returns:
            (rank, places) to send requests for.
        """
        self._begun = self._begun or now
        here = list(finished)
        for rank, known in self._peers.items():
            known.over |= rank not in here
        requests = []
        for rank in here:
            peer = self._peers.get(rank)
            if peer is None:
                peer = self._peers[rank] = _Peer(now + pause, Backoff(self._questions))
            if peer.over or now < peer.due:
                continue
            lacking = missing(rank)
            asked = peer.question.asked
            wanted = self._wanted(peer, lacking, now) if asked else self._first(peer, lacking, rows(rank), now)
            if wanted is None:
                continue
            peer.places, peer.since = wanted, peer.since or now
            peer.spare = self._ask(peer.question, now)
            peer.due = now + self._look
            self.asked.setdefault(rank, wanted)
            requests.append((rank, wanted))
        return requests

    def _owing(self, rank: int) -> _Peer | None:
        """``rank``, if it has been asked and an answer may still come."""
        peer = self._peers.get(rank)
        return peer if peer is not None and peer.question.asked and not peer.over else None

    def _answered(self, peer: _Peer, now: int) -> None:
        self._answers.observe(now - peer.since)
        peer.over = True

    def _first(self, peer: _Peer, lacking: Places, rows: int, now: int) -> Places | None:
        if 4 * len(lacking) > rows and len(lacking) > FEW and not peer.delayed:
            peer.delayed = True
            self._random = self._random or random.Random(self._seed)
            peer.due = now + self._random.randrange(self._patience)
            return None
        wanted = thin(lacking, self._left)
        self._left -= len(wanted)
        peer.over = not len(wanted)
        return None if peer.over else wanted

    def _ask(self, question: Backoff, now: int) -> int:
        """It is asked now; when to ask once more in the time that the last question waits, 0: not at all.

        Where answers take 2 ms and the last question waits for 20, one of a hundred small ops under 1 % of losses
        waited for what nobody would send: two questions, or their answers, had been lost.
        """
        if question.over:
            return 0
        question.ask(now)
        self._wait(question, now)
        usual = self._answers.value
        last = self._questions.times == question.unheard == question.asked == REPEATS + 1
        spare = last and now + 3 * usual <= question.due
        return now + 2 * usual if spare else 0

    def _wait(self, question: Backoff, now: int) -> None:
        """The last question waits as long as answers ever take, the others as long as they usually do."""
        question.wait(now, self._patience if question.over else min(self._answers.value, self._patience))

    def _wanted(self, peer: _Peer, lacking: Places, now: int) -> Places | None:
        """What is still missing of what was asked for, if it is time to ask again."""
        wanted = np.intersect1d(peer.places, lacking, assume_unique=True)
        peer.due = now + self._look
        if len(wanted) == 0:
            self._answered(peer, now)
        elif len(wanted) < len(peer.places):
            peer.places, peer.question.unheard, peer.spare = wanted, 0, 0
            self._wait(peer.question, now)
        elif now >= peer.question.due:
            if not peer.question.over:
                return wanted
            peer.over = True
        elif peer.spare and now >= peer.spare:
            return wanted
        return None


class Budget:
    """Bytes that may be spent on answers now: a share of the pace, saved up to ``depth``.

    Args:
        pace: bytes per second at which this rank sends; to be set anew whenever another one is in force.
        depth: bytes saved up at most.
    """

    def __init__(self, pace: float, depth: int = 256 << 10) -> None:
        self.pace, self._depth = pace, depth
        self._tokens, self._at = float(depth), 0

    def take(self, size: int, now: int) -> int:
        """How many of ``size`` bytes may be sent at ``now``; they are taken off."""
        if now > self._at:
            self._tokens = min(float(self._depth), self._tokens + (now - self._at) * 1e-9 * self.pace * SHARE)
            self._at = now
        granted = min(size, int(self._tokens))
        self._tokens -= granted
        return granted

    def give(self, size: int) -> None:
        """Puts back what was granted and not needed."""
        self._tokens += size

    def enough_in(self, size: int) -> int:
        """Nanoseconds until ``size`` bytes (at most the depth) are there."""
        lacking = min(size, self._depth) - self._tokens
        return int(lacking / (self.pace * SHARE) * 1e9) + 1 if lacking > 0 else 0


@dataclass
class Request:
    """Rows that one rank asked for and has not been sent yet."""

    label: int
    asker: int
    first_half: bool  #: contributions, not results
    layout: int
    places: Places
    holes: bool = False  #: some of what was asked for does not exist
    sent: bool = False  #: and some does


class Requests:
    """What has been asked of this rank: newest op first, each row once per request.

    Args:
        most: requests kept; beyond them the oldest op's are forgotten (it will be asked for again, or was in vain).
    """

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._waiting: dict[tuple[int, int, bool], Request] = {}
        self._gone: OrderedDict[tuple[int, int, bool], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Takes a request; rows of the same op for the same rank are put together."""
        key = request.label, request.asker, request.first_half
        old = self._waiting.get(key)
        if old is not None and old.layout == request.layout:
            request.places = np.union1d(old.places, request.places)
        self._waiting[key] = request
        if len(self._waiting) > self._most:
            del self._waiting[_extreme(self._waiting, newest=False)]

    def newest(self, without: Collection[int] = ()) -> Request | None:
        """The request to answer first, of those of ranks that are not among ``without``."""
        left = [key for key in self._waiting if key[1] not in without]
        return self._waiting[_extreme(left, newest=True)] if left else None

    def done(self, request: Request, count: int) -> None:
        """The first ``count`` places of ``request`` have been dealt with."""
        request.places = request.places[count:]
        if not len(request.places):
            self._waiting.pop((request.label, request.asker, request.first_half), None)

    def say_gone(self, label: int, asker: int, *, first_half: bool) -> bool:
        """Whether ``asker`` is to be told that rows of ``label`` are gone: once."""
        key = label, asker, first_half
        if key in self._gone:
            return False
        self._gone[key] = None
        while len(self._gone) > self._most:
            self._gone.popitem(last=False)
        return True


def _extreme(found: Iterable[tuple[int, int, bool]], *, newest: bool) -> tuple[int, int, bool]:
    """The key of the newest or the oldest op; of one op's, the first."""
    keys = list(found)

    def age(key: tuple[int, int, bool]) -> int:
        return serial_distance(keys[0][0], key[0])

    return min(keys, key=age) if newest else max(keys, key=age)


class Repairs:
    """What a rank keeps about repair beside its ops: requests, budgets, and how far every key is in its warm-up."""

    def __init__(self, ranks: int, floor: int = FLOOR) -> None:
        self.requests = Requests()
        self._budget = Budget(0.0)
        self._paced: dict[int, Budget] = {}  # of ranks that were ever sent to at a rate
        self.answers = AnswerTime(floor // SOON, PATIENCE_MOST)
        #: rows asked for that came, by the rank that was asked: contributions and results
        self.came = np.zeros((2, ranks), np.int64)
        self._finished: dict[tuple[int, int, int, int], int] = {}

    def take(self, asker: int, size: int, now: int, pace: float, rate: float) -> int:
        """How many of ``size`` bytes of answers may be sent to ``asker`` at ``now``; they are taken off.

        Args:
            asker: who has asked.
            size: bytes.
            now: ns.
            pace: bytes per second at which this rank sends to all others together.
            rate: bytes per second to which what is sent to ``asker`` is held; 0: not held.
        """
        self._budget.pace = pace
        granted = self._budget.take(size, now)
        if rate:
            own = self._paced.setdefault(asker, Budget(rate))
            own.pace = rate
            held = own.take(granted, now)
            self._budget.give(granted - held)
            granted = held
        return granted

    def give(self, asker: int, size: int, rate: float) -> None:
        """Puts back what ``take`` has granted and was not needed."""
        self._budget.give(size)
        if rate:
            self._paced[asker].give(size)

    def enough_in(self, asker: int, size: int, rate: float) -> int:
        """Nanoseconds until ``size`` bytes (at most what is saved up) may be sent to ``asker``, after ``take``."""
        return max(self._budget.enough_in(size), self._paced[asker].enough_in(size) if rate else 0)

    def warming(self, key: tuple[int, int, int, int]) -> bool:
        """Whether the next op of ``key`` (``Op.plain``) belongs to its warm-up."""
        return self._finished.get(key, 0) < WARM_UP_OPS

    def finished(self, key: tuple[int, int, int, int]) -> None:
        """An op of ``key`` (``Op.plain``) is over."""
        self._finished[key] = self._finished.get(key, 0) + 1


def encode_repair(places: NDArray[np.int64], width: int) -> list[tuple[int, bytes]]:
    """(``row``, body) of the REPAIR packets that ask for ``places`` (i64[], rising), at most ``width`` bytes each."""
    out = []
    while len(places):
        first = int(places[0])
        here = places[places < first + 8 * width]
        bits = np.zeros(int(here[-1]) - first + 1, np.uint8)
        bits[here - first] = 1
        out.append((first, np.packbits(bits).tobytes()))
        places = places[len(here) :]
    return out


def decode_repair(body: bytes, row: int, rows: int) -> NDArray[np.int64] | None:
    """The places that a REPAIR packet asks for (i64[], rising); None if it asks for nothing or beyond ``rows``."""
    places: NDArray[np.int64] = np.flatnonzero(np.unpackbits(np.frombuffer(body, np.uint8))) + row
    if not len(places) or int(places[-1]) >= rows:
        return None
    return places
