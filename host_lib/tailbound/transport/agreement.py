"""Agreeing on owner maps: two phases, led by the lowest live rank (clock-22). Pure, with the time passed in.

The leader proposes a map, every live rank acknowledges it, a quorum in any case (clock-38), and only then the leader
settles the step with which it begins, three or more after the newest. A proposal lasts until that, or until the leader
wants something else. A map that has been settled is told to every rank whose headers name an older one
(``map_known``), by whoever knows: the leader may have died meanwhile.

An id means one map with one beginning, for good, and every packet that is placed by a map carries its id. So ranks that
know different maps refuse each other's packets and lose them, but never put a row where it does not belong. Of two maps
that two leaders settled, each taking the other for dead, the one with the higher id replaces the other everywhere,
history included: what is told is a chain of the newest maps.
"""

from __future__ import annotations

import enum
import itertools
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tailbound.codec.owners import OwnerMap
from tailbound.transport.backoff import Backoff, Policy
from tailbound.transport.config import MS
from tailbound.transport.steps import OLD, STEP_MASK, step_distance
from tailbound.wire.schema import MAX_RANKS, serial_distance

#: A map begins so many steps after the newest one that its leader has heard of.
LEAD_STEPS = 3
#: So many maps are remembered, and told as one chain.
CHAIN = 4
#: How a packet of the same purpose is sent to the same rank again; a proposal soon, since a rank that was stopped may
#: be all that it waits for.
_AGAIN, _SOON = Policy(2 * MS, 250 * MS), Policy(2 * MS, 32 * MS)
#: Others than the leader wait so long before they tell of a map.
_PATIENCE = 20 * MS

_HEAD, _ENTRY = struct.Struct(">BBHI"), struct.Struct(">IIH")


class Kind(enum.IntEnum):
    """What the body of a MAP packet is."""

    PROPOSE = 1  #: one map, without its beginning; ``ref``: the id of the map it is to follow
    ACKNOWLEDGE = 2  #: ``ref``: the id proposed, or a higher one that another rank has proposed, or the one known
    SETTLED = 3  #: the newest maps with their beginnings, oldest first
    TURN = 4  #: keys have been tried too often here; ``ref``: the turns that the next map should have (auth-8)


class Agreed(NamedTuple):
    """A settled map, and the step it begins with."""

    since: int
    map: OwnerMap


class Message(NamedTuple):
    """Body of a MAP packet."""

    kind: Kind
    ref: int = 0
    maps: tuple[Agreed, ...] = ()


def _bytes_of(ranks: int) -> int:
    """Of a bit for each rank."""
    return -(-ranks // 8)


def encode_map(message: Message, ranks: int) -> bytes:
    """The body of a MAP packet."""
    parts = [_HEAD.pack(message.kind, len(message.maps), ranks, message.ref)]
    for each in message.maps:
        owners = sum(1 << rank for rank in each.map.owners)
        parts += [_ENTRY.pack(each.map.id, each.since, each.map.turns & 0xFFFF), owners.to_bytes(_bytes_of(ranks))]
    return b"".join(parts)


def decode_map(body: bytes, ranks: int) -> Message | None:
    """The body of a MAP packet, or None if it is not one of a job of ``ranks``."""
    if len(body) < _HEAD.size:
        return None
    kind, count, size, ref = _HEAD.unpack_from(body)
    if size != ranks or kind not in Kind.__members__.values():
        return None
    if count != {Kind.PROPOSE: 1, Kind.SETTLED: count or 1}.get(kind, 0):
        return None
    at, maps = _HEAD.size, []
    for _ in range(count):
        end = at + _ENTRY.size + _bytes_of(ranks)
        if end > len(body):
            return None
        ident, since, turns = _ENTRY.unpack_from(body, at)
        bits = int.from_bytes(body[at + _ENTRY.size : end])
        if not 0 < bits < 1 << ranks or since > STEP_MASK or ident & 0xFF >= ranks:
            return None
        maps.append(Agreed(since, OwnerMap(ident, tuple(r for r in range(ranks) if bits >> r & 1), turns)))
        at = end
    for a, b in itertools.pairwise(maps):
        if serial_distance(b.map.id, a.map.id) <= 0 or step_distance(b.since, a.since) <= 0:
            return None
    return Message(Kind(kind), ref, tuple(maps))


@dataclass
class _Proposal:
    """A map that has been proposed here and not been settled yet."""

    map: OwnerMap
    again: Backoff
    acknowledged: set[int] = field(default_factory=set)


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
        self.rank, self.ranks = rank, ranks
        self._quorum = quorum
        #: settled maps, oldest first; the last one may still be to begin
        self.agreed: list[Agreed] = [Agreed(first_step, OwnerMap(0, first))]
        self._chain = min(CHAIN, (room - _HEAD.size) // (_ENTRY.size + _bytes_of(ranks + 1)))
        self._proposal: _Proposal | None = None
        self._highest = 0  # id that was proposed here, or that this rank has acknowledged
        self._answers: list[tuple[int, Message]] = []
        self._telling: dict[int, Backoff] = {}  # by the rank that is told

    @property
    def known(self) -> int:
        """Id of the newest map known in full, for ``map_known`` of every header."""
        return self.agreed[-1].map.id

    @property
    def wanted(self) -> OwnerMap:
        """What is proposed here, or was agreed on last."""
        return self._proposal.map if self._proposal is not None else self.agreed[-1].map

    @property
    def quiet(self) -> bool:
        """Whether nothing is on its way: ``poll`` does nothing, unless a peer does not know the newest map."""
        return not (self._answers or self._proposal or self._telling)

    def adopt(self, agreed: Sequence[Agreed]) -> None:
        """Goes on with the maps that another rank knows, oldest first: this one comes back to a job under way."""
        self.agreed, self._proposal = list(agreed)[-CHAIN:], None

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

    def waiting(self, step: int) -> bool:
        """Whether the newest map has still to begin for a rank in ``step``, and nothing can be proposed."""
        return step_distance(step, self.agreed[-1].since) < 0

    def propose(self, owners: tuple[int, ...], step: int, now: int, turns: int = 0) -> bool:
        """Proposes a map in place of what was proposed before; returns whether this is new.

        Args:
            owners: ranks that own rows, rising.
            step: of this rank.
            now: ns.
            turns: of keys that came before their time (auth-8).
        """
        present, wanted = self.agreed[-1].map, self.wanted
        if (owners, turns) == (present.owners, present.turns):
            self._proposal = None
        elif (owners, turns) != (wanted.owners, wanted.turns) and not self.waiting(step) and self._chain >= 2:
            self._begin(owners, turns, now)
            return True
        return False

    def _begin(self, owners: tuple[int, ...], turns: int, now: int) -> None:
        counter = (max(self.known, self._highest, key=lambda i: serial_distance(i, self.known)) >> 8) + 1
        self._highest = (counter << 8 | self.rank) & 0xFFFFFFFF
        self._proposal = _Proposal(OwnerMap(self._highest, owners, turns), Backoff(_SOON, now))

    def receive(self, message: Message, sender: int, live: Collection[int], now: int) -> None:
        """Takes a message of another rank; ``live``: peers that this rank takes for alive. ``agreed`` may change."""
        if message.kind == Kind.PROPOSE:
            self._consider(message, sender, live, now)
        elif message.kind == Kind.ACKNOWLEDGE:
            self._count(message.ref, sender, now)
        elif message.kind == Kind.SETTLED:
            newest = message.maps[-1]
            ahead = serial_distance(newest.map.id, self.known)
            if ahead > 0:
                self._adopt(message.maps)
            if ahead >= 0:
                self._answers.append((sender, Message(Kind.ACKNOWLEDGE, self.known)))
            else:
                self._telling[sender] = Backoff(_AGAIN, now)

    def poll(
        self, now: int, newest: int, live: Collection[int], known: Mapping[int, int], lead: int = LEAD_STEPS
    ) -> list[tuple[int, Message]]:
        """What is to be sent now, to whom; a proposal may be settled, which changes ``agreed``.

        Args:
            newest: newest step that this rank or a peer has named.
            live: peers taken for alive; all of them have to acknowledge.
            known: ``map_known`` of every peer that is to be told of maps.
            lead: steps after the newest one with which a map begins; more than three where steps are short.
        """
        out, self._answers = self._answers, []
        if min(live, default=self.rank) < self.rank:
            self._proposal = None
        proposal = self._proposal
        if proposal is not None:
            missing = [p for p in live if p not in proposal.acknowledged]
            if not missing and self._quorum({self.rank, *proposal.acknowledged}):
                since = newest + lead
                if step_distance(since, self.agreed[-1].since) <= 0:
                    since = self.agreed[-1].since + 1
                self._adopt((*self.agreed, Agreed(since & STEP_MASK, proposal.map)))
            elif now >= proposal.again.due:
                out += [(p, Message(Kind.PROPOSE, self.known, (Agreed(0, proposal.map),))) for p in missing]
                proposal.again.ask(now)
        return out + self._tell(now, known)

    def due(self) -> int:
        """When ``poll`` is due again; 0 if nothing is on its way."""
        looks = [telling.due for telling in self._telling.values()]
        if self._proposal is not None:
            looks.append(self._proposal.again.due)
        return min(looks, default=0)

    def _tell(self, now: int, known: Mapping[int, int]) -> list[tuple[int, Message]]:
        out = []
        for peer, newest in known.items():
            if serial_distance(self.known, newest) <= 0:
                self._telling.pop(peer, None)
                continue
            leader = self.known & 0xFF == self.rank
            telling = self._telling.setdefault(peer, Backoff(_AGAIN, now if leader else now + _PATIENCE))
            if now >= telling.due:
                out.append((peer, Message(Kind.SETTLED, 0, tuple(self.agreed[-self._chain :]))))
                telling.ask(now)
        for peer in [p for p in self._telling if p not in known]:
            del self._telling[peer]
        return out

    def _consider(self, message: Message, sender: int, live: Collection[int], now: int) -> None:
        """Acknowledges a proposal, unless it is not its sender's turn, or it does not follow the newest map."""
        proposed = message.maps[0].map
        if proposed.id & 0xFF != sender or min(live, default=sender) < sender or self.rank < sender:
            return
        if message.ref != self.known:
            if serial_distance(self.known, message.ref) > 0:
                self._telling[sender] = Backoff(_AGAIN, now)
            return
        if serial_distance(proposed.id, self._highest) >= 0:
            self._highest, self._proposal = proposed.id, None
        self._answers.append((sender, Message(Kind.ACKNOWLEDGE, self._highest)))

    def _count(self, ref: int, sender: int, now: int) -> None:
        proposal = self._proposal
        if proposal is None:
            return
        if ref == proposal.map.id:
            proposal.acknowledged.add(sender)
        elif serial_distance(ref, proposal.map.id) > 0:  # another rank has proposed more: begin above that
            self._highest = ref
            self._begin(proposal.map.owners, proposal.map.turns, now)

    def _adopt(self, chain: tuple[Agreed, ...]) -> None:
        """Takes the history that the newest map has: what is newer than the chain's first and not in it is dropped."""
        kept = [each for each in self.agreed if serial_distance(each.map.id, chain[0].map.id) < 0]
        self.agreed = [*kept, *chain][-CHAIN:]
        self._proposal = None
        self._telling.clear()


assert MAX_RANKS <= 256  # the proposer's rank is the low byte of an id
