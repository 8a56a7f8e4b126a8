"""Agreeing on owner maps while packets are lost, late and doubled, and ranks die (clock-22)."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.codec.owners import OwnerMap
from tailbound.codec.shape import shape_for
from tailbound.transport.agreement import (
    CHAIN,
    LEAD_STEPS,
    Agreed,
    Agreement,
    Kind,
    Message,
    decode_map,
    encode_map,
)
from tailbound.transport.membership import Membership
from tailbound.transport.sequence import Layout, Sequence
from tailbound.transport.steps import step_distance

MS = 1_000_000


# -- what packets say ---------------------------------------------------------------------------------------------

MAPS = st.builds(
    lambda owners, turns: (tuple(sorted(owners)), turns), st.sets(st.integers(0, 2), min_size=1), st.integers(0, 65535)
)
REFS = st.integers(0, 2**32 - 1)
MESSAGES = st.one_of(
    st.builds(
        lambda ident, one, ref: Message(Kind.PROPOSE, ref, (Agreed(0, OwnerMap(ident << 8, *one)),)),
        st.integers(0, 99), MAPS, REFS,
    ),
    st.builds(lambda ref: Message(Kind.ACKNOWLEDGE, ref), REFS),
    st.builds(
        lambda ones: Message(
            Kind.SETTLED, 0, tuple(Agreed(3 * i, OwnerMap(i << 8 | 2, *one)) for i, one in enumerate(ones))
        ),
        st.lists(MAPS, min_size=1, max_size=CHAIN),
    ),
)  # fmt: skip


@given(MESSAGES, st.integers(0, 15))
def test_messages_come_back_from_their_bodies(message: Message, padding: int) -> None:
    body = encode_map(message, 3)
    assert decode_map(body + bytes(padding), 3) == message
    assert decode_map(body, 4) is None
    assert all(decode_map(body[:n], 3) is None for n in range(len(body)))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_none(body: bytes) -> None:
    message = decode_map(body, 3)
    if message is not None:
        decode_again = decode_map(encode_map(message, 3), 3)
        assert decode_again == message
        for each in message.maps:
            assert each.map.owners


def due(rank: Agreement, step: int) -> Agreed:
    """The map of ``step``, as far as ``rank`` knows."""
    return [each for each in rank.agreed if each is rank.agreed[0] or step_distance(step, each.since) >= 0][-1]


# -- two or three ranks, step by step -----------------------------------------------------------------------------


def ranks_of(count: int) -> list[Agreement]:
    return [Agreement(rank, count, tuple(range(count)), Membership(count, rank).quorum) for rank in range(count)]


def turn(ranks: list[Agreement], who: int, now: int, *, step: int = 5, live: list[int] | None = None) -> list[int]:
    """One rank's turn, its packets delivered at once; returns to whom it sent."""
    live = [r for r in range(len(ranks)) if r != who] if live is None else live
    known = {r: ranks[r].known for r in live}
    sent = ranks[who].poll(now, step, live, known)
    for to, message in sent:
        whom = [r for r in range(len(ranks)) if r != to]
        ranks[to].receive(decode_map(encode_map(message, len(ranks)), len(ranks)), who, whom, now)
    return [to for to, _ in sent]


def rounds(ranks: list[Agreement], times: range, **how: list[int]) -> None:
    """Rank 0 takes a turn every millisecond, and rank 1 answers; ``live``: whom rank 0 takes for alive."""
    for now in times:
        turn(ranks, 0, now * MS, live=how.get("live"))
        turn(ranks, 1, now * MS, live=how.get("answers"))


def test_a_map_begins_three_steps_after_the_newest_once_all_have_acknowledged() -> None:
    ranks = ranks_of(3)
    wanted = (0, 2)
    assert ranks[0].propose(wanted, 5, 0)
    assert turn(ranks, 0, 0) == [1, 2]
    turn(ranks, 1, 0)
    assert turn(ranks, 0, MS) == []
    assert ranks[0].known == 0
    turn(ranks, 2, MS)
    assert turn(ranks, 0, 2 * MS, step=7) == [1, 2]
    assert {r.agreed[-1] for r in ranks} == {Agreed(7 + LEAD_STEPS, OwnerMap(1 << 8, wanted))}
    assert due(ranks[1], 9).map.id == 0
    assert due(ranks[1], 10).map.owners == (0, 2)


def test_a_proposal_waits_for_all_who_live_and_gives_way_to_another_wish() -> None:
    """The majority once waited 300 ms for a rank that was away, and 600 ms before it could propose again."""
    ranks = ranks_of(3)
    assert ranks[0].propose((0, 1), 5, 0)
    assert not ranks[0].propose((0, 1), 5, 0)
    rounds(ranks, range(900), live=[1, 2])  # rank 2 never answers
    rounds(ranks, range(900, 1000), live=[2])
    assert ranks[0].known == 0
    assert ranks[0].wanted.owners == (0, 1)
    assert ranks[0].propose((0, 2), 5, 1000 * MS)
    rounds(ranks, range(1000, 1003), live=[1])
    assert ranks[0].agreed[-1] == ranks[1].agreed[-1] == Agreed(5 + LEAD_STEPS, OwnerMap(2 << 8, (0, 2)))
    assert ranks[0].propose((0, 1), 8, 1003 * MS)
    assert not ranks[0].propose((0, 2), 8, 1003 * MS)  # as it is: what was proposed is withdrawn
    assert ranks[0].quiet


def test_only_the_lowest_live_rank_is_answered() -> None:
    ranks = ranks_of(3)
    ranks[1].propose((1, 2), 5, 0)
    message = ranks[1].poll(0, 5, [2], {})[0][1]
    for live, answered in (([0, 1], False), ([1], True)):
        ranks[2].receive(message, 1, live, 0)
        assert bool(ranks[2].poll(0, 5, live, {})) == answered
    ranks[0].receive(message, 1, [1, 2], 0)
    assert ranks[0].poll(0, 5, [1, 2], {}) == []


def test_nothing_is_proposed_that_is_so_or_while_a_map_is_to_begin() -> None:
    ranks = ranks_of(2)
    assert not ranks[0].propose((0, 1), 5, 0)
    assert ranks[0].propose((1,), 5, 0)
    rounds(ranks, range(3))
    assert ranks[0].known == ranks[1].known == 1 << 8
    assert not ranks[0].propose((0, 1), 7, 3 * MS)
    assert ranks[0].propose((0, 1), 8, 3 * MS)


def test_whoever_knows_a_map_tells_those_whose_headers_do_not() -> None:
    ranks = ranks_of(3)
    ranks[0].propose((0, 1), 5, 0)
    rounds(ranks, range(3), live=[1], answers=[0])  # they take rank 2 for dead
    assert [r.known for r in ranks] == [256, 256, 0]
    assert turn(ranks, 1, 10 * MS, live=[2]) == []  # the leader goes first
    assert turn(ranks, 1, 40 * MS, live=[2]) == [2]
    assert ranks[2].agreed == ranks[1].agreed
    assert turn(ranks, 1, 400 * MS, live=[2]) == []


def test_a_job_whose_maps_fill_no_packet_keeps_its_map() -> None:
    rank = Agreement(0, 200, tuple(range(200)), Membership(200, 0).quorum, room=64)
    assert not rank.propose(tuple(range(199)), 5, 0)


# -- many ranks, a bad network, random histories ------------------------------------------------------------------


class Network:
    """Ranks that step on, talk over a bad network, believe each other dead now and then, and place ops."""

    LAYOUT = Layout((0, 1000, 0, 1), shape_for(3000, 64), 7, True)

    def __init__(self, ranks: int, seed: int, *, loss: float, delay: int) -> None:
        self.random = random.Random(seed)
        self.loss, self.delay, self.now = loss, delay, 0
        self.ranks = ranks_of(ranks)
        self.sequences = [Sequence(ranks, due(each, 0).map) for each in self.ranks]
        self.shown = [0] * ranks
        self.seen = [[0] * ranks for _ in self.ranks]  # map_known as heard: by whom, of whom
        self.believed = [set(range(ranks)) - {r} for r in range(ranks)]
        self.dead: set[int] = set()
        self.places: list[dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]]] = [{} for _ in self.ranks]
        self.maps: dict[int, Agreed] = {}
        self._wires: list[tuple[int, int, int, int, bytes]] = []  # when, order, to and by whom, what
        self._order = itertools.count()

    def send(self, sender: int, to: int, body: bytes) -> None:
        for _ in range(1 + (self.random.random() < 0.05)):
            if self.random.random() >= self.loss:
                late = self.now + int(self.random.expovariate(1 / self.delay)) + 50_000
                heapq.heappush(self._wires, (late, next(self._order), to, sender, body))

    def step_of(self, rank: int) -> int:
        return self.sequences[rank].next_label >> 10

    def tick(self) -> None:
        """A millisecond: packets arrive, every live rank takes a turn, perhaps a step."""
        self.now += MS
        while self._wires and self._wires[0][0] <= self.now:
            _, _, rank, sender, body = heapq.heappop(self._wires)
            if rank in self.dead:
                continue
            self.seen[rank][sender] = max(self.seen[rank][sender], int.from_bytes(body[:4], "big"))
            if message := decode_map(body[4:], len(self.ranks)):
                self.ranks[rank].receive(message, sender, self.believed[rank], self.now)
        newest = max(self.step_of(r) for r in range(len(self.ranks)) if r not in self.dead)
        for rank, agreement in enumerate(self.ranks):
            if rank in self.dead:
                continue
            known = {p: self.seen[rank][p] for p in range(len(self.ranks)) if p != rank}
            # how far the others are is heard late
            heard_newest = max(self.step_of(rank), newest - self.random.randrange(2))
            for to, message in agreement.poll(self.now, heard_newest, self.believed[rank], known):
                self.send(rank, to, agreement.known.to_bytes(4, "big") + encode_map(message, len(self.ranks)))
            if self.random.random() < 0.3:  # the headers of ordinary packets
                for to in known:
                    self.send(rank, to, agreement.known.to_bytes(4, "big"))
            self._place(rank, newest)
            self.check(rank)

    def _place(self, rank: int, newest: int) -> None:
        agreement, sequence = self.ranks[rank], self.sequences[rank]
        if agreement.known != self.shown[rank]:
            self.shown[rank] = agreement.known
            sequence.set_maps(agreement.agreed)
        behind = newest - self.step_of(rank)
        if self.random.random() < (0.25 if behind == 0 else 0.6):
            if self.random.random() < 0.3:
                sequence.predict()
            place, _ = sequence.assign(self.LAYOUT)
            owner_map = place.placement.owner_map
            self.places[rank][place.step] = (owner_map.id, owner_map.owners, place.sum_seqs)

    def check(self, rank: int) -> None:
        """An id means one map with one beginning, whoever knows it."""
        for each in self.ranks[rank].agreed:
            assert self.maps.setdefault(each.map.id, each) == each

    def wish(self, rank: int) -> None:
        owners = tuple(r for r in range(len(self.ranks)) if self.random.random() < 0.8)
        if owners and min(self.believed[rank], default=rank) > rank:
            self.ranks[rank].propose(owners, self.step_of(rank), self.now, self.random.randrange(2))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_no_two_ranks_use_one_id_for_two_maps_and_all_come_to_the_same_one(ranks: int, seed: int) -> None:
    world = Network(ranks, 100 * ranks + seed, loss=0.05 * (seed % 4), delay=(1 + seed % 3) * MS)
    draw, settled = world.random, 0
    for tick in range(1500):
        if tick % 10 == 0:
            world.wish(draw.randrange(ranks))
        if draw.random() < 0.01:  # opinions on who is alive differ, for a while
            rank = draw.randrange(ranks)
            world.believed[rank] ^= {draw.choice([r for r in range(ranks) if r != rank])}
        elif draw.random() < 0.02:
            rank = draw.randrange(ranks)
            world.believed[rank] = set(range(ranks)) - world.dead - {rank}
        if tick == 700 and ranks > 2 and seed % 2:
            world.dead.add(draw.randrange(ranks))
            for believed in world.believed:
                believed -= world.dead
        world.tick()
    live = [r for r in range(ranks) if r not in world.dead]
    world.loss = 0.05
    for rank in live:  # peace
        world.believed[rank] = set(live) - {rank}
    for _ in range(1200):
        world.tick()
        if all(world.ranks[r].known == world.ranks[live[0]].known for r in live) and not any(
            world.ranks[r].waiting(world.step_of(r)) or not world.ranks[r].quiet for r in live
        ):
            settled += 1
        if settled > 60:
            break
    histories = [world.ranks[r].agreed[-1] for r in live]
    assert len(set(histories)) == 1
    assert len(world.maps) > 2
    # the same id for an op means the same owners; and in the end all put every row at the same place again
    for step in range(max(max(p, default=0) for p in world.places)):
        used = {(p[step][0], p[step][1]) for p in world.places if step in p}
        assert len({ident for ident, _ in used}) == len(used)
    last = max(set.intersection(*(set(world.places[r]) for r in live)))
    assert len({world.places[r][last] for r in live}) == 1


@pytest.mark.parametrize("seed", [0, 3])
def test_when_the_leader_dies_the_next_one_leads(seed: int) -> None:
    world = Network(4, seed, loss=0.1, delay=MS)
    world.ranks[0].propose((0, 2, 3), 0, 0)
    for _ in range(3 + seed):  # between its proposal and the end of it
        world.tick()
    world.dead.add(0)
    for believed in world.believed:
        believed.discard(0)
    wanted = (1, 2, 3)
    for _ in range(5000):
        world.ranks[1].propose(wanted, world.step_of(1), world.now)
        world.tick()
        if all(r.agreed[-1].map.owners == wanted for r in world.ranks[1:]):
            break
    assert [r.agreed[-1].map.owners for r in world.ranks[1:]] == [wanted] * 3
