"""Agreeing on owner maps step by step, where ranks die, come back or are behind (clock-22)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.codec.owners import OwnerMap
from tailbound.transport.agreement import CHAIN, OPEN, Agreed, Agreement, Message, decode_map, encode_map
from tailbound.transport.membership import Membership
from tailbound.transport.steps import OLD, STEP_MASK, step_distance

MS = 1_000_000


def test_no_map_that_is_remembered_seems_to_be_still_to_come() -> None:
    """Steps wrap after 2^22. Maps that change just before they would be dated anew make the longest history."""
    one = Agreement(0, 2, (0,), lambda ranks: True)
    for step in range(0, 1 << 23, OLD // 2):
        since = [step_distance(step & STEP_MASK, each.since) for each in one.agreed]
        assert since == sorted(since, reverse=True)
        assert since[-1] >= 0
        one.age(step & STEP_MASK)
        if step // (OLD // 2) % 4 == 3:
            one.propose((step // OLD // 2 & 1,), step & STEP_MASK)
            one.poll(0, lambda step=step: step & STEP_MASK, [], {})


# -- what packets say ---------------------------------------------------------------------------------------------

MAPS = st.tuples(st.sets(st.integers(0, 2), min_size=1).map(sorted).map(tuple), st.integers(0, 65535))


@given(st.integers(0, 2**32 - 1), st.integers(0, 65535), st.lists(MAPS, max_size=CHAIN), st.none() | MAPS)
def test_messages_come_back_from_their_bodies(
    highest: int, turns: int, settled: list[tuple[tuple[int, ...], int]], proposed: tuple[tuple[int, ...], int] | None
) -> None:
    maps = [Agreed(3 * i, OwnerMap(i << 8 | 2, *one)) for i, one in enumerate(settled)]
    if proposed is not None:
        maps.append(Agreed(OPEN, OwnerMap(CHAIN << 8, *proposed)))
    message = Message(highest, tuple(maps), turns)
    body = encode_map(message, 3)
    assert decode_map(body + bytes(7), 3) == (message if settled or not proposed else None)
    assert decode_map(body, 4) is None
    assert all(decode_map(body[:n], 3) is None for n in range(len(body)))


def test_a_proposal_comes_last() -> None:
    first, later = OwnerMap(1, (0,)), OwnerMap(257, (1,))
    bad = [
        (Agreed(OPEN, first), Agreed(7, later)),
        (Agreed(OPEN, first), Agreed(OPEN, later)),
        (Agreed(7, first), Agreed(7, later)),
        (Agreed(7, later), Agreed(OPEN, first)),
        (Agreed(OPEN + 1, first),),
    ]
    assert [decode_map(encode_map(Message(0, maps), 3), 3) for maps in bad] == [None] * 5


@pytest.mark.parametrize(("owners", "told"), [((0, 1), True), ((2,), True), ((0, 2), False), ((0, 1, 2), False)])
def test_a_switch_owns_all_rows_or_none(owners: tuple[int, ...], told: bool) -> None:
    body = encode_map(Message(0, (Agreed(7, OwnerMap(256, owners)),)), 3)
    assert (decode_map(body, 3, 2) is not None) == told
    assert decode_map(body, 3) is not None


def test_maps_that_are_told_no_more_are_remembered_unless_some_between_are_missing() -> None:
    """A rank that was stopped is behind by more than one map, and places rows by those of its steps."""
    maps = [Agreed(3 * n, OwnerMap(n << 8, (n % 2,))) for n in range(9)]
    for heard in (range(CHAIN, 10), (CHAIN, 6, 9), (9,)):
        one = Agreement(1, 2, (0,), lambda ranks: True)
        for end in heard:
            one.receive(Message(0, tuple(maps[end - CHAIN : end])), 0, [0], 0)
        assert one.agreed == (maps if len(heard) > 1 else maps[-CHAIN:])


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_none(body: bytes) -> None:
    message = decode_map(body, 3)
    assert message is None or decode_map(encode_map(message, 3), 3) == message


# -- two or three ranks, step by step -----------------------------------------------------------------------------


def ranks_of(count: int) -> list[Agreement]:
    return [Agreement(rank, count, tuple(range(count)), Membership(count, rank).quorum) for rank in range(count)]


def rounds(ranks: list[Agreement], times: range, live: list[int] | None = None) -> None:
    """Every millisecond rank 0 takes a turn, then rank 1, whose packets come at once.

    ``live``: whom rank 0 takes for alive; None: all others.
    """
    for now in times:
        for who in (0, 1):
            there = live if who == 0 and live is not None else [r for r in range(len(ranks)) if r != who]
            for to, message in ranks[who].poll(now * MS, lambda: 8, there, {r: ranks[r].known for r in there}):
                others = [r for r in range(len(ranks)) if r != to]
                ranks[to].receive(decode_map(encode_map(message, len(ranks)), len(ranks)), who, others, now * MS)


def test_a_proposal_waits_for_all_who_live_and_gives_way_to_another_wish() -> None:
    """The majority once waited 300 ms for a rank that was away, and 600 ms before it could propose again."""
    ranks = ranks_of(3)
    assert ranks[0].propose((0, 1), 5)
    assert not ranks[0].propose((0, 1), 5)
    rounds(ranks, range(900), live=[1, 2])  # rank 2 never answers
    rounds(ranks, range(900, 1000), live=[2])
    assert ranks[0].known == 0
    assert ranks[0].wanted.owners == (0, 1)
    assert ranks[0].propose((0, 2), 5)
    rounds(ranks, range(1000, 1003), live=[1])
    assert ranks[0].agreed[-1] == ranks[1].agreed[-1] == Agreed(8, OwnerMap(2 << 8, (0, 2)))
    assert ranks[0].propose((0, 1), 8)
    assert not ranks[0].propose((0, 2), 8)  # as it is: what was proposed is withdrawn
    assert not ranks[0].poll(1003 * MS, lambda: 8, [1], {1: ranks[1].known})


def test_a_map_begins_three_steps_after_the_newest_and_after_the_one_before() -> None:
    """Also where what is heard of steps is older than that; nothing is proposed meanwhile. Rule: clock-22."""
    ranks = ranks_of(2)
    assert not ranks[0].propose((0, 1), 5), "it is so"
    assert ranks[0].propose((1,), 5)
    rounds(ranks, range(3))
    assert not ranks[0].propose((0, 1), 7)
    assert ranks[0].propose((0, 1), 8)
    rounds(ranks, range(3, 6))
    assert [each.since for each in ranks[1].agreed] == [0, 8, 9]


@pytest.mark.parametrize(
    ("rank", "times"),
    [(0, [0, 2, 6, 14, 30, 62, 126, 254, 504, 754]), (1, [20, 22, 26, 34, 50, 82, 146, 274, 524, 774])],
    ids=["by its leader", "by another rank a little later"],
)
def test_a_peer_that_does_not_know_the_map_is_told_ever_more_rarely(rank: int, times: list[int]) -> None:
    """Rule: clock-22."""
    teller = ranks_of(3)[rank]
    teller.adopt([*teller.agreed, Agreed(9, OwnerMap(1 << 8, (0, 1)))])
    assert [now for now in range(800) if teller.poll(now * MS, lambda: 8, [2], {2: 0})] == times
    assert not teller.poll(2000 * MS, lambda: 8, [2], {2: 1 << 8})


def test_a_proposal_is_repeated_soon_to_who_has_not_acknowledged_it() -> None:
    """A rank that was stopped may be all that it waits for."""
    leader = ranks_of(3)[0]
    leader.propose((0, 1), 5)
    leader.receive(Message(1 << 8), 1, [1, 2], 0)
    asked = {now: leader.poll(now * MS, lambda: 8, [1, 2], {}) for now in range(160)}
    assert [now for now, sent in asked.items() if [peer for peer, _ in sent] == [2]] == [
        0,
        2,
        6,
        14,
        *range(30, 160, 32),
    ]


def test_a_job_whose_maps_fill_no_packet_keeps_its_map() -> None:
    rank = Agreement(0, 200, tuple(range(200)), Membership(200, 0).quorum, room=64)
    assert not rank.propose(tuple(range(199)), 5)


# -- what keeps an id from meaning two maps ---------------------------------------------------------------------------


def proposed(ident: int, owners: tuple[int, ...] = (0, 1)) -> Message:
    """A proposal that follows the first map."""
    return Message(ident, (Agreed(0, OwnerMap(0, (0, 1, 2, 3))), Agreed(OPEN, OwnerMap(ident, owners))))


@pytest.mark.parametrize(
    ("sender", "live", "message", "answered"),
    [
        (1, [1], proposed(1 << 8 | 1), True),
        (1, [0, 1], proposed(1 << 8 | 1), False),
        (3, [3], proposed(1 << 8 | 3), False),
        (1, [1], proposed(1 << 8 | 3), False),
    ],
    ids=["the lowest live rank", "not the lowest", "a higher rank", "by an id of another rank"],
)
def test_whose_proposal_is_acknowledged(sender: int, live: list[int], message: Message, answered: bool) -> None:
    rank = ranks_of(4)[2]
    rank.receive(message, sender, live, 0)
    assert rank.poll(0, lambda: 8, live, {}) == [(sender, Message(message.highest))] * answered


def test_who_proposes_or_settles_what_is_old_is_told_the_newest_map() -> None:
    newest = Agreed(9, OwnerMap(5 << 8, (0, 2)))
    for message in (proposed(1 << 8), Message(0, (Agreed(3, OwnerMap(1 << 8, (0, 1))),))):
        rank = ranks_of(3)[1]
        rank.adopt([*rank.agreed, newest])
        rank.receive(message, 0, [0, 2], 0)
        assert rank.agreed[-1] == newest
        ((to, told),) = rank.poll(0, lambda: 8, [0, 2], {0: 0})
        assert (to, told.maps[-1]) == (0, newest)


def test_a_map_that_is_news_is_acknowledged_whoever_tells_it() -> None:
    """Its teller may propose besides, without a right to: that is left alone."""
    newest = Agreed(9, OwnerMap(5 << 8, (0, 2)))
    for more in ((), (Agreed(OPEN, OwnerMap(6 << 8 | 2, (0,))),)):
        rank = ranks_of(3)[1]
        for answers in (1, int(not more)):
            rank.receive(Message(7 << 8, (newest, *more)), 2, [0, 2], 0)
            assert rank.poll(0, lambda: 8, [0, 2], {2: 5 << 8}) == [(2, Message(0))] * answers
            assert rank.agreed[-1] == newest


def test_an_id_that_was_acknowledged_once_is_never_used_again() -> None:
    """A leader that has come back counts from the beginning: it is told how far others have counted."""
    ranks = ranks_of(2)
    ranks[1].receive(proposed(9 << 8, (1,)), 0, [0], 0)
    ranks[1].poll(0, lambda: 8, [0], {})
    ranks[0].propose((0,), 5)
    rounds(ranks, range(1))
    assert ranks[0].wanted == OwnerMap(10 << 8, (0,))
    rounds(ranks, range(1, 10))
    assert ranks[0].agreed[-1] == ranks[1].agreed[-1] == Agreed(8, OwnerMap(10 << 8, (0,)))


def test_nothing_is_settled_without_a_majority() -> None:
    rank = ranks_of(3)[0]
    rank.propose((0,), 5)
    for now in range(100):
        rank.poll(now * MS, lambda: 8, [], {})
    assert (rank.known, rank.wanted.owners) == (0, (0,))


@pytest.mark.parametrize("heard", [True, False], ids=["it acknowledges another one", "a lower rank lives again"])
def test_who_leads_no_longer_gives_up_its_proposal(heard: bool) -> None:
    rank = ranks_of(3)[1]
    rank.propose((1, 2), 5)
    if heard:
        rank.receive(proposed(2 << 8), 0, [0, 2], 0)
    else:
        rank.poll(0, lambda: 8, [0, 2], {})
    assert rank.wanted.owners == (0, 1, 2)
