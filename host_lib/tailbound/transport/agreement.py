"""Owner maps: which ranks should own rows, and agreeing on that (clock-22). Pure, with the time passed in.

All ranks own rows but stragglers, suspects and the dead (``Shares``). A rank that is late with its gradient holds up
only its own rows' share of the work if it owns nothing: after it has come, its contributions go out while results come
in, about one buffer's time instead of 2 (N - 1) / N of it (StragglAR's gain, for any number of ranks from three on, and
several stragglers at once). Every change costs an agreement, so nothing follows a single observation of lateness: a
rank goes after several late steps in a row. It is back after a few in time, and after twice as many where it soon goes
again. So a rank that is late and in time in turn stays out.

Agreeing takes two phases, led by the lowest live rank (``Agreement``).
There is one message: the newest maps that its sender knows, and the map that it proposes to follow them. An answer has
neither, and says only the highest id that its sender has proposed or acknowledged. Each rank is in one of three states:

    state      sends a message to                               until
    quiet      no rank                                          it proposes or tells
    proposes   live peers that have not acknowledged            all have, and a quorum (clock-38): then the map is
                                                                settled, and begins three or more steps later
    tells      peers whose headers name an older map            their headers name the newest one

The leader proposes where it wants another map than it has, and gives that up for another wish or a lower rank. Whoever
knows a map tells it, since the leader may have died; others than the leader do so a little later.

An id means one map with one beginning, for good, and every packet that is placed by a map carries its id. So ranks that
know different maps refuse each other's packets and lose them, but never put a row where it does not belong. Of two maps
that two leaders settled, each taking the other for dead, the one with the higher id replaces the other everywhere,
history included: that is why several maps are told.
"""

from __future__ import annotations

import itertools
import math
import statistics
import struct
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from tailbound.codec.owners import OwnerMap
from tailbound.transport.backoff import Backoff, Policy
from tailbound.transport.config import MS
from tailbound.transport.steps import OLD, STEP_MASK, step_distance
from tailbound.wire.schema import MAX_RANKS, serial_distance

#: So many maps are told as one chain, and so many remembered: a rank that is behind places rows by those of its steps.
#: Each may be dated anew only when the next one settles, so more of them would reach half of all steps back.
CHAIN, KEPT = 4, 12
#: The beginning of a map that is only proposed.
OPEN = STEP_MASK + 1
#: How a peer is told again; of a proposal soon, since a rank that was stopped may be all that it waits for.
_AGAIN, _SOON = Policy(2 * MS, 250 * MS), Policy(2 * MS, 32 * MS)
#: Others than the leader wait so long before they tell of a map.
_PATIENCE = 20 * MS

assert MAX_RANKS <= 256  # the proposer's rank is the low byte of an id
#: A rank is no straggler below this lateness, whatever the pace.
_LEAST = 5 * MS
#: Late steps in a row before a rank loses its rows; steps in time in a row, the first time and at most, before it gets
#: them back; and what each step in time as an owner leaves of a longer wait.
_LATE_STEPS, _WAIT, _WAIT_MOST, _LEFT = 4, 8, 128, 0.995
#: Ops that say how late this rank is as a rule.
_LATENESSES = 16

_HEAD, _ENTRY = struct.Struct(">BxHIHxx"), struct.Struct(">IIH")


class Agreed(NamedTuple):
    """A settled map, and the step it begins with; or a proposed one, which begins at ``OPEN``."""

    since: int
    map: OwnerMap


class Message(NamedTuple):
    """Body of a MAP packet.

    Attributes:
        highest: id of a map that the sender has proposed or acknowledged.
        maps: the newest ones that it knows, oldest first; the last may be a proposal. None: this is an answer.
        turns: of keys that the next map should have, where they have been tried too often here (auth-8); 0: no matter.
    """

    highest: int
    maps: tuple[Agreed, ...] = ()
    turns: int = 0


def _bytes_of(ranks: int) -> int:
    """Of a bit for each rank."""
    return -(-ranks // 8)


def encode_map(message: Message, ranks: int) -> bytes:
    """The body of a MAP packet."""
    parts = [_HEAD.pack(len(message.maps), ranks, message.highest, message.turns)]
    for each in message.maps:
        owners = sum(1 << rank for rank in each.map.owners)
        parts += [_ENTRY.pack(each.map.id, each.since, each.map.turns & 0xFFFF), owners.to_bytes(_bytes_of(ranks))]
    return b"".join(parts)


def decode_map(body: bytes, ranks: int, switch: int | None = None) -> Message | None:
    """The body of a MAP packet, or None if it is not one of a job of ``ranks``; ``switch``: owns all rows or none."""
    if len(body) < _HEAD.size:
        return None
    count, size, highest, asked = _HEAD.unpack_from(body)
    length, maps = _ENTRY.size + _bytes_of(ranks), []
    end = _HEAD.size + count * length
    if size != ranks or len(body) < end:
        return None
    for at in range(_HEAD.size, end, length):
        ident, since, turns = _ENTRY.unpack_from(body, at)
        bits = int.from_bytes(body[at + _ENTRY.size : at + length])
        if not 0 < bits < 1 << ranks or since > OPEN or ident & 0xFF >= ranks:
            return None
        if switch is not None and bits >> switch & 1 and bits != 1 << switch:
            return None
        maps.append(Agreed(since, OwnerMap(ident, tuple(r for r in range(ranks) if bits >> r & 1), turns)))
    for a, b in itertools.pairwise(maps):
        later = b.since == OPEN or step_distance(b.since, a.since) > 0
        if a.since == OPEN or serial_distance(b.map.id, a.map.id) <= 0 or not later:
            return None
    return None if len(maps) == 1 and maps[0].since == OPEN else Message(highest, tuple(maps), asked)


class Agreement:
    """One rank's part in agreeing.

    Args:
        rank, ranks: this rank, and world size.
        first: owners of the map with id 0, with which the job begins on all ranks alike; it may name a switch.
        quorum: whether those that have acknowledged are enough.
        first_step: the job's first step.
        room: bytes that the body of a packet can have.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        first: tuple[int, ...],
        quorum: Callable[[Collection[int]], bool],
        first_step: int = 0,
        room: int = 1408,
    ) -> None:
        self.rank = rank
        self._quorum = quorum
        #: settled maps, oldest first; the last one may still be to begin
        self.agreed: list[Agreed] = [Agreed(first_step, OwnerMap(0, first))]
        self._most = min(CHAIN + 1, (room - _HEAD.size) // (_ENTRY.size + _bytes_of(ranks + 1)))  # maps in a packet
        self._proposed: OwnerMap | None = None
        self._acknowledged: set[int] = set()
        self._highest = 0  # id that was proposed here, or that this rank has acknowledged
        self._answers: list[int] = []  # ranks that are owed one
        self._telling: dict[int, Backoff] = {}  # by the rank that is told

    @property
    def known(self) -> int:
        """Id of the newest map known in full, for ``map_known`` of every header."""
        return self.agreed[-1].map.id

    @property
    def wanted(self) -> OwnerMap:
        """What is proposed here, or was agreed on last."""
        return self._proposed or self.agreed[-1].map

    def adopt(self, agreed: Sequence[Agreed]) -> None:
        """Goes on with the maps that another rank knows, oldest first."""
        self.agreed, self._proposed = list(agreed)[-KEPT:], None
        self._telling.clear()

    def age(self, step: int) -> bool:
        """Keeps maps that began long before ``step`` from seeming to be still to come, when step numbers turn over.

        The map in force is dated ``OLD`` steps back, and those before it are forgotten. To be called every ``OLD``
        steps at least.

        Returns:
            Whether ``agreed`` has changed; what is in force, and what is to come, has not.
        """
        begun = sum(step_distance(step, each.since) >= 0 for each in self.agreed)
        if not begun or step_distance(step, self.agreed[begun - 1].since) <= 2 * OLD:
            return False
        present = Agreed(step - OLD & STEP_MASK, self.agreed[begun - 1].map)
        self.agreed = [present, *self.agreed[begun:]]
        return True

    def propose(self, owners: tuple[int, ...], step: int, turns: int = 0) -> bool:
        """Proposes a map in place of what was proposed before; returns whether this is new.

        Args:
            owners: ranks that own rows, rising.
            step: of this rank.
            turns: of keys (auth-4).
        """
        present, wanted, wish = self.agreed[-1].map, self.wanted, (owners, turns)
        begun = step_distance(step, self.agreed[-1].since) >= 0  # else there is one to come, and room for no other
        if wish == (present.owners, present.turns):
            self._proposed = None
        elif wish != (wanted.owners, wanted.turns) and begun and self._most >= 2:
            self._propose(owners, turns)
            return True
        return False

    def _propose(self, owners: tuple[int, ...], turns: int) -> None:
        counter = (max(self.known, self._highest, key=lambda i: serial_distance(i, self.known)) >> 8) + 1
        self._highest = (counter << 8 | self.rank) & 0xFFFFFFFF
        self._proposed, self._acknowledged = OwnerMap(self._highest, owners, turns), set()
        self._telling.clear()

    def receive(self, message: Message, sender: int, live: Collection[int], now: int) -> None:
        """Takes a message of another rank; ``live``: peers that this rank takes for alive. ``agreed`` may change."""
        if not message.maps:
            mine = self._proposed
            if mine is not None and message.highest == mine.id:
                self._acknowledged.add(sender)
            elif mine is not None and serial_distance(message.highest, mine.id) > 0:
                self._highest = message.highest  # another rank has proposed more: begin above that
                self._propose(mine.owners, mine.turns)
            return
        settled = [each for each in message.maps if each.since != OPEN]
        newest, proposed = settled[-1].map.id, message.maps[-1].map
        news = serial_distance(newest, self.known) > 0
        if news:  # its history counts, too: maps that are not in it are dropped
            first = settled[0].map.id
            older = [each for each in self.agreed if serial_distance(each.map.id, first) < 0]
            known = any(each.map.id == first for each in self.agreed)  # else some between may be missing
            self.adopt([*older, *settled] if known else settled)
        if newest != self.known:
            self._telling[sender] = Backoff(_AGAIN, now)
            return
        leads = proposed.id & 0xFF == sender < self.rank and min(live, default=sender) >= sender
        if news or leads or proposed.id == newest:
            self._answers.append(sender)
        if leads and serial_distance(proposed.id, self._highest) >= 0:
            self._highest, self._proposed = proposed.id, None

    def poll(
        self, now: int, begins: Callable[[], int], live: Collection[int], known: Mapping[int, int]
    ) -> list[tuple[int, Message]]:
        """What is to be sent now, to whom; a proposal may be settled, which changes ``agreed``.

        Args:
            begins: the step that a map begins with which is settled now, or a later one.
            live: peers taken for alive; all of them have to acknowledge.
            known: ``map_known`` of every peer that is to be told of maps.
        """
        out = [(peer, Message(self._highest)) for peer in self._answers]
        self._answers = []
        if min(live, default=self.rank) < self.rank:
            self._proposed = None
        asked = set() if self._proposed is None else {*live} - self._acknowledged
        if self._proposed is not None and not asked and self._quorum({self.rank, *self._acknowledged}):
            since, least = begins(), self.agreed[-1].since + 1
            since = since if step_distance(since, least) > 0 else least
            self.adopt([*self.agreed, Agreed(since & STEP_MASK, self._proposed)])
        newest = self.known
        behind = {p for p, theirs in known.items() if theirs != newest and serial_distance(newest, theirs) > 0}
        maps = (*self.agreed, *([Agreed(OPEN, self._proposed)] if self._proposed is not None else []))
        patience = 0 if self._proposed is not None or self.known & 0xFF == self.rank else _PATIENCE
        self._telling = {peer: again for peer, again in self._telling.items() if peer in asked | behind}
        for peer in sorted(asked | behind):
            again = self._telling.setdefault(peer, Backoff(_SOON if peer in asked else _AGAIN, now + patience))
            if now >= again.due:
                out.append((peer, Message(self._highest, maps[-self._most :])))
                again.ask(now)
        return out

    def due(self) -> int:
        """When ``poll`` is due again; 0 if no rank is to be told."""
        return min((again.due for again in self._telling.values()), default=0)


class Lateness:
    """Own lateness: launch minus the time at which half of the others had come, in nearly all of the last ops.

    The third smallest of the last sixteen counts. A straggler is late in every op; ranks that wait for cores are late
    in turn.

    The others alone are counted: with the own launch among them, two stragglers of four would hide each other. Of an
    even number the upper median counts: of three ranks that wait for cores in turn, two come after the first each time.
    """

    def __init__(self) -> None:
        self._samples: deque[int] = deque(maxlen=_LATENESSES)

    def add(self, launched: int, arrivals: Collection[int]) -> None:
        """Takes the own launch and the first arrivals of live peers in one op, in ns of one clock."""
        if arrivals:
            self._samples.append(launched - statistics.median_high(arrivals))

    @property
    def value(self) -> int:
        """Lateness in nearly all ops, ns, at least 0; 0 until half of a window has been seen."""
        if 2 * len(self._samples) < _LATENESSES:
            return 0
        return max(0, sorted(self._samples)[len(self._samples) // 8])


class Shares:
    """Turns observations, one a step, into the ranks that own rows.

    Args:
        ranks: world size.
        least: so many have to own rows, since rings have no room for a larger share.
    """

    def __init__(self, ranks: int, least: int = 1) -> None:
        self._late = [0] * ranks  # steps in a row
        self._owed = [0] * ranks  # steps in time before a rank owns rows; 0: it does
        self._waits = [_WAIT / 2] * ranks  # what a rank owed when it went last
        self._least = min(least, ranks)
        self.owners: tuple[int, ...] = tuple(range(ranks))

    def update(self, lateness: Mapping[int, int], absent: Collection[int], pace: int) -> tuple[int, ...]:
        """Takes one observation; returns the owners that the next map should have.

        Args:
            lateness: as advertised, ns, by rank.
            absent: ranks that are suspect, dead or gone.
            pace: ns that an op takes as a rule, from launch to result.
        """
        # with two ranks half of a buffer goes out and half in, or a whole one either way: nothing to gain
        limit = late_limit(lateness.values(), pace) if len(self._owed) > 2 else math.inf
        for rank, owed in enumerate(self._owed):
            late = lateness.get(rank, 0)
            self._late[rank] = self._late[rank] + 1 if late > limit else 0
            if rank in absent or (late > limit and (owed or self._late[rank] >= _LATE_STEPS)):
                if not owed:
                    self._waits[rank] = min(_WAIT_MOST, 2 * self._waits[rank])
                self._owed[rank] = round(self._waits[rank])
            elif owed and 2 * late <= limit:
                self._owed[rank] = owed - 1
            elif not owed and late <= limit:
                self._waits[rank] = max(_WAIT / 2, _LEFT * self._waits[rank])
        self.owners = self._enough(lateness, absent)
        return self.owners

    def _enough(self, lateness: Mapping[int, int], absent: Collection[int]) -> tuple[int, ...]:
        """Those that are to own rows, and as many more as are needed: half of the ranks that are there.

        Two at least: the rows of a single owner are lost together, and with them all that the others would learn.
        """
        there = len(self._owed) - len(absent)
        fewest = max(self._least, min(max(there, 1), max(2, -(-there // 2))))
        owners = [rank for rank, owed in enumerate(self._owed) if not owed]
        spare = sorted(
            set(range(len(self._owed))).difference(owners),
            key=lambda r: (r in absent, r not in self.owners, lateness.get(r, 0), r),
        )
        return tuple(sorted(owners + spare[: max(0, fewest - len(owners))]))


def late_limit(lateness: Collection[int], pace: int) -> int:
    """Lateness (ns) above which a rank is a straggler, with those of all ranks, where an op takes ``pace`` ns.

    Where one is very late, all wait for it: who comes long before it holds up no rank.
    """
    return max(_LEAST, pace // 4, max(lateness, default=0) // 4)
