"""Agreeing on owner maps step by step, where ranks die, come back or are behind (clock-22)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.codec.owners import OwnerMap
from tailbound.transport.agreement import CHAIN, Agreed, Agreement, Kind, Message, decode_map, encode_map
from tailbound.transport.membership import Membership

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
            for to, message in ranks[who].poll(now * MS, 5, there, {r: ranks[r].known for r in there}):
                others = [r for r in range(len(ranks)) if r != to]
                ranks[to].receive(decode_map(encode_map(message, len(ranks)), len(ranks)), who, others, now * MS)


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
    assert ranks[0].agreed[-1] == ranks[1].agreed[-1] == Agreed(8, OwnerMap(2 << 8, (0, 2)))
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


def test_a_job_whose_maps_fill_no_packet_keeps_its_map() -> None:
    rank = Agreement(0, 200, tuple(range(200)), Membership(200, 0).quorum, room=64)
    assert not rank.propose(tuple(range(199)), 5, 0)


# -- what keeps an id from meaning two maps ---------------------------------------------------------------------------


def proposed(ident: int, owners: tuple[int, ...] = (0, 1), ref: int = 0) -> Message:
    """A proposal that follows the map ``ref``."""
    return Message(Kind.PROPOSE, ref, (Agreed(0, OwnerMap(ident, owners)),))


@pytest.mark.parametrize(
    ("sender", "message", "answer"),
    [
        (0, proposed(1 << 8), 1 << 8),
        (0, proposed(1 << 8 | 2), None),
        (0, proposed(10 << 8, ref=9 << 8), None),
        (2, proposed(1 << 8 | 2), None),
    ],
    ids=["of the leader", "by an id of another rank", "after a map that is not known", "of a higher rank"],
)
def test_what_rank_1_acknowledges(sender: int, message: Message, answer: int | None) -> None:
    rank = ranks_of(3)[1]
    rank.receive(message, sender, [sender], 0)
    found = rank.poll(0, 5, [sender], {})
    assert found == ([] if answer is None else [(sender, Message(Kind.ACKNOWLEDGE, answer))])


def test_who_proposes_or_settles_what_is_old_is_told_the_newest_map() -> None:
    newest = Agreed(9, OwnerMap(5 << 8, (0, 2)))
    for message in (proposed(1 << 8), Message(Kind.SETTLED, 0, (Agreed(3, OwnerMap(1 << 8, (0, 1))),))):
        rank = ranks_of(3)[1]
        rank.adopt([*rank.agreed, newest])
        rank.receive(message, 0, [0, 2], 0)
        assert rank.agreed[-1] == newest
        ((to, told),) = rank.poll(0, 5, [0, 2], {0: 0})
        assert (to, told.kind, told.maps[-1]) == (0, Kind.SETTLED, newest)


def test_an_id_that_was_acknowledged_once_is_never_used_again() -> None:
    """A leader that has come back counts from the beginning: it is told how far others have counted."""
    ranks = ranks_of(2)
    ranks[1].receive(proposed(9 << 8, (1,)), 0, [0], 0)
    ranks[1].poll(0, 5, [0], {})
    ranks[0].propose((0,), 5, 0)
    rounds(ranks, range(1))
    assert ranks[0].wanted == OwnerMap(10 << 8, (0,))
    rounds(ranks, range(1, 10))
    assert ranks[0].agreed[-1] == ranks[1].agreed[-1] == Agreed(8, OwnerMap(10 << 8, (0,)))


def test_a_map_begins_three_steps_after_the_newest_and_after_the_one_before() -> None:
    """Also where what is heard of steps is older than that. Rule: clock-22."""
    ranks = ranks_of(2)
    ranks[0].propose((1,), 5, 0)
    rounds(ranks, range(3))
    ranks[0].propose((0, 1), 8, 3 * MS)
    rounds(ranks, range(3, 6))
    assert [each.since for each in ranks[1].agreed] == [0, 8, 9]


def test_nothing_is_settled_without_a_majority() -> None:
    rank = ranks_of(3)[0]
    rank.propose((0,), 5, 0)
    for now in range(100):
        rank.poll(now * MS, 5, [], {})
    assert (rank.known, rank.wanted.owners) == (0, (0,))


@pytest.mark.parametrize("heard", [True, False], ids=["it acknowledges another one", "a lower rank lives again"])
def test_who_leads_no_longer_gives_up_its_proposal(heard: bool) -> None:
    rank = ranks_of(3)[1]
    rank.propose((1, 2), 5, 0)
    if heard:
        rank.receive(proposed(2 << 8), 0, [0, 2], 0)
    else:
        rank.poll(0, 5, [0, 2], {})
    assert rank.wanted.owners == (0, 1, 2)
