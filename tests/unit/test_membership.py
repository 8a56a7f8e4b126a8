"""Who takes part: suspects, dead ranks, goodbyes, holds and votes (clock-1, clock-14 to clock-16)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.transport.config import MS
from tailbound.transport.membership import HOLD_SILENCE, Membership, Suspicion
from tailbound.transport.steps import OLD, STEP_MASK

HOLD_MAX = 1000 * MS


def membership() -> Membership:
    return Membership(ranks=4, rank=1, after=3, hold_max=HOLD_MAX)


def test_who_is_accused_is_suspect_at_once_and_once() -> None:
    who = membership()
    for op, new in ((7, True), (9, False)):
        assert who.contribution.accuse(3, op) == new
        assert (who.contribution.first_missed[3], who.live) == (7, [2, 0])


def test_nobody_is_blamed_for_what_is_missing_in_ops_launched_while_this_rank_was_away() -> None:
    """Nor in the rest of the step that it jumps to; however many steps pass."""
    who = membership()
    who.woke(5, 100)
    assert [who.blames(*op) for op in ((4, 90), (5, 0), (5, 100), (5, 101), (6, 0))] == [False] * 3 + [True] * 2
    who.woke(5)
    assert [who.blames(step, 1 << 62) for step in (5, 6)] == [False, True]
    who.age(6 + OLD)
    assert who.blames(5 - STEP_MASK // 2 & STEP_MASK)


@pytest.mark.parametrize(
    ("half", "live", "owners"), [("contribution", [2, 0], [2, 3, 0]), ("result", [2, 3, 0], [2, 0])]
)
def test_who_is_suspect_in_one_half_and_silent_for_two_steps_is_dead(
    half: str, live: list[int], owners: list[int]
) -> None:
    """A rank without rows misses nothing in the first half, and is missed in no second one (clock-15)."""
    who = membership()
    who.heard(3, 5)
    for op in range(3):
        assert who.dead(9) == set()
        getattr(who, half).absent({3}, op)
    assert (who.live, who.owners) == (live, owners)
    assert who.dead(6) == set()
    assert who.dead(7) == {3}
    who.heard(3, 6)
    assert who.dead(7) == set()
    who.heard(3, 4)  # an old word takes nothing back
    assert who.dead(7) == set()


def test_a_rank_that_was_away_counts_the_silence_of_others_from_its_return_on() -> None:
    who = membership()
    for op in range(3):
        who.contribution.absent({3}, op)
    who.heard(3, 5)
    assert [who.alive(step) for step in (6, 7)] == [[2, 3, 0], [2, 0]]
    assert [who.alive(step, 4) for step in (8, 9)] == [[2, 3, 0], [2, 0]]
    who.woke(8)
    assert [who.alive(step) for step in (9, 10)] == [[2, 3, 0], [2, 0]]
    far = 8 + OLD + 1
    who.age(far)
    assert who.alive(far) == [2, 0]


#: Words on holds as (method, arguments), and in between (time, when the hold of that time ends; 0: none holds).
HOLDS: dict[str, list[tuple[Any, ...]]] = {
    "it ends by a silence": [(0, 0), ("hold", 2, 100), (100, 100 + HOLD_SILENCE), (100 + HOLD_SILENCE, 0)],
    "it ends by a word": [("hold", 2, 500), ("unhold", 2), (501, 0)],
    "it ends with a goodbye, whatever comes later": [
        ("hold", 2, 10), ("bye", 2, 0), (11, 0), ("hold", 2, 12), (13, 0), ("hold", 3, 14), (15, 14 + HOLD_SILENCE),
    ],
    "the last one counts": [("hold", 2, 100), ("hold", 3, 300), ("hold", 0, 200), (400, 300 + HOLD_SILENCE)],
    "it ends with a death, and what was recorded begins none": [
        ("hold", 2, 100), ("died", 2, 0), (101, 0), ("hold", 2, 200), (201, 0), ("back", 2, 5), (202, 0),
        ("hold", 2, 300), (301, 300 + HOLD_SILENCE),
    ],
    "it is the same one where a word comes as it ends": [
        *(("hold", 2, now) for now in range(0, HOLD_MAX + 1, HOLD_SILENCE)), (HOLD_MAX, 0),
    ],
}  # fmt: skip


@pytest.mark.parametrize("said", HOLDS.values(), ids=HOLDS)
def test_when_a_hold_ends(said: list[tuple[Any, ...]]) -> None:
    who = membership()
    for what, *rest in said:
        if isinstance(what, str):
            getattr(who, what)(*rest)
        else:
            assert [who.holding(what)] == rest


def test_a_word_that_is_repeated_prolongs_a_hold_and_begins_none() -> None:
    who = membership()
    who.hold(2, 1, again=True)
    assert who.holding(2) == 0
    who.hold(2, 1)
    for now in range(1, 3 * HOLD_MAX, 2 * HOLD_SILENCE):  # with a silence between any two
        who.hold(2, now, again=True)
        assert bool(who.holding(now)) == (now < 1 + HOLD_MAX)
    who.hold(2, now + 2 * HOLD_SILENCE)
    assert who.holding(now + 2 * HOLD_SILENCE)


#: Ranks of a job, those that have said goodbye, whose processes have ended and that are only silent; how many votes
#: are a quorum then, and who of the silent is suspect.
VOTES = [
    (2, "", "", "1", 2, ""), (2, "1", "", "", 1, ""), (2, "", "1", "", 1, "1"), (3, "", "", "2", 2, "2"),
    (3, "", "", "12", 2, ""), (3, "2", "", "1", 2, ""), (4, "", "", "3", 3, "3"), (4, "", "", "23", 3, ""),
    (4, "", "23", "1", 2, "23"), (4, "3", "2", "1", 2, "2"), (5, "", "4", "3", 3, "34"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "gone", "ended", "silent", "votes", "suspects"), VOTES)
def test_a_quorum_is_a_majority_of_those_that_may_still_take_part(
    ranks: int, gone: str, ended: str, silent: str, votes: int, suspects: str
) -> None:
    """Rules: clock-14, clock-38."""
    who = Membership(ranks, 0)
    for rank in map(int, gone):
        who.bye(rank, 0)
    for op in range(3):
        who.contribution.absent(set(map(int, silent)), op)
    for rank in map(int, ended):
        assert who.died(rank, 0)
    order = sorted(who.voters)
    assert [n for n in range(ranks) if who.quorum(order[:n])] == list(range(votes, ranks))
    assert not who.quorum({*order[: votes - 1], *map(int, gone), *map(int, ended)}), "they have no vote"
    assert who.contribution.suspects == set(map(int, suspects))


def test_a_process_that_has_ended_votes_again_when_it_is_back() -> None:
    """It is a new one, or a firewall that said so has changed its mind. Rule: clock-38."""
    for back in (lambda who: who.back(3, 9), lambda who: who.contribution.clear(3)):
        who = membership()
        who.died(3, 0)
        assert who.voters == {0, 1, 2}
        back(who)
        assert who.voters == {0, 1, 2, 3}


@given(st.integers(2, 9), st.integers(1, 4), st.lists(st.sets(st.integers(0, 8)), max_size=30))
def test_suspects_are_those_absent_from_the_last_stages(ranks: int, after: int, stages: list[set[int]]) -> None:
    suspicion = Suspicion(ranks, 0, after, lambda: suspicion.judge(set(range(ranks))))
    running: dict[int, int] = {}  # misses
    for op, absent in enumerate(stages):
        running = {rank: running.get(rank, 0) + 1 for rank in absent if 0 < rank < ranks}
        assert suspicion.absent(absent, op) == {rank for rank, misses in running.items() if misses == after}
    expected = {rank for rank, misses in running.items() if misses >= after}
    assert suspicion.suspects == (expected if 2 * len(expected) < ranks else set())
    for rank in expected:
        there = [op for op, absent in enumerate(stages) if rank not in absent]
        assert suspicion.first_missed[rank] == max(there, default=-1) + 1
