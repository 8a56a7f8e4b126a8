"""Trying a group: whom it reaches, under loss both ways, in one direction only, and when the fabric changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

import pytest

from tailbound.transport.config import MS
from tailbound.transport.reach import (
    BAD,
    ENOUGH,
    FEW,
    GAP,
    GOOD,
    ROUND,
    VOLLEY,
    WINDOW,
    Ears,
    Reach,
)

PEERS = (1, 2, 3)


class Fabric:
    """One sender and its peers in virtual time; who gets what is up to the test."""

    def __init__(
        self, seed: int = 1, loss: float = 0.0, deaf: Collection[int] = (), mute: Collection[int] = ()
    ) -> None:
        self.reach = Reach(PEERS)
        self.ears = {peer: Ears() for peer in PEERS}
        self.loss, self.deaf, self.mute = loss, set(deaf), set(mute)
        self.now = 1
        self.tries = self.questions = 0
        self._random = random.Random(seed)

    def _through(self) -> bool:
        return self._random.random() >= self.loss

    def step(self, live: Collection[int] = PEERS) -> None:
        """One turn at the time it asked for; answers come a millisecond later."""
        self.now = max(self.now, self.reach.look)
        answers = []
        for say in self.reach.turn(self.now, live):
            if say.kind == "try":
                self.tries += 1
                for peer in PEERS:
                    if peer not in self.deaf and self._through():
                        self.ears[peer].hear(0, say.number)
                continue
            self.questions += 1
            if say.rank not in self.mute and self._through() and self._through():
                answers.append((say.rank, say.number, self.ears[say.rank].answer(0, say.number)))
        self.now += MS if answers else 0
        for answer in answers:
            self.reach.answer(*answer, self.now)

    def rounds(self, count: int, live: Collection[int] = PEERS, until: Callable[[], bool] = lambda: False) -> None:
        end = self.reach.rounds + count
        while self.reach.rounds < end and not until():
            self.step(live)


def test_a_fabric_that_delivers_is_found_in_one_round() -> None:
    fabric = Fabric()
    assert fabric.reach.missing(PEERS) == [1, 2, 3]
    assert not fabric.reach.decided
    fabric.rounds(1)
    assert fabric.reach.missing(PEERS) == []
    assert (fabric.tries, fabric.questions) == (ROUND, len(PEERS))
    assert fabric.now < 2 * ROUND * MS
    assert fabric.reach.look - fabric.now == GOOD


def test_a_rank_of_many_hears_no_more_a_second() -> None:
    reach, now, peers = Reach(range(1, 8 * FEW + 1)), 0, range(1, 8 * FEW + 1)
    while not reach.decided:
        for say in reach.turn(now, peers):
            if say.kind == "question":
                reach.answer(say.rank, say.number, (1 << ROUND) - 1, now)
        now = max(now, reach.look)
    assert reach.missing(peers) == []
    assert reach.look - GAP * ROUND < 8 * GOOD <= reach.look


@pytest.mark.parametrize("loss", [0.05])
def test_loss_costs_time_and_no_truth(loss: float) -> None:
    found = 0
    for seed in range(60):
        fabric = Fabric(seed, loss)
        fabric.rounds(1)
        found += fabric.reach.missing(PEERS) == []
    assert found > 57


def test_one_deaf_peer_is_named_and_asked_ever_more_seldom() -> None:
    fabric = Fabric(deaf=[2])
    pauses = []
    for _ in range(12):
        fabric.rounds(1)
        pauses.append(fabric.reach.look - fabric.now)
        assert fabric.reach.missing(PEERS) == [2]
        assert fabric.reach.missing([1, 3]) == []
    assert pauses[:3] == [BAD.first, 2 * BAD.first, 4 * BAD.first]
    assert pauses[-1] == BAD.most


def test_one_bad_round_is_repeated_before_it_counts() -> None:
    fabric = Fabric()
    fabric.rounds(1)
    fabric.deaf = {1}
    fabric.rounds(1)
    assert fabric.reach.missing(PEERS) == []
    assert fabric.reach.look - fabric.now <= GAP
    fabric.deaf.clear()
    fabric.rounds(1)
    assert fabric.reach.missing(PEERS) == []
    fabric.deaf = {1}
    fabric.rounds(2)
    assert fabric.reach.missing(PEERS) == [1]
    fabric.deaf.clear()
    fabric.rounds(1)
    assert fabric.reach.missing(PEERS) == []


def test_silence_says_nothing_about_the_fabric() -> None:
    fabric = Fabric()
    fabric.rounds(1)
    fabric.mute = {1, 2}
    fabric.rounds(5)
    assert fabric.reach.missing(PEERS) == []


def test_a_change_hurries_the_next_round() -> None:
    fabric = Fabric()
    fabric.rounds(1)
    fabric.reach.hurry(fabric.now)
    assert fabric.reach.look <= fabric.now


def test_answers_to_other_questions_count_for_nothing() -> None:
    reach = Reach(PEERS)
    now = 1
    for _ in range(ROUND // VOLLEY):
        now = max(now, reach.look)
        reach.turn(now, PEERS)
    everything = (1 << WINDOW) - 1
    for rank, number in [(1, ROUND - 1), (1, ROUND + 1), (9, ROUND)]:
        reach.answer(rank, number, everything, now)
    assert reach.missing(PEERS) == [1, 2, 3]
    reach.answer(1, ROUND, everything, now)
    reach.answer(1, ROUND, 0, now)
    reach.answer(2, ROUND, (1 << ENOUGH) - 1, now)
    reach.answer(3, ROUND, (1 << ENOUGH - 1) - 1, now)
    assert reach.missing(PEERS) == [3]
    assert reach.rounds == 1


def test_without_live_peers_nothing_is_sent() -> None:
    assert Reach(PEERS).turn(1, ()) == []


def test_ears_know_the_last_packets_whatever_their_order() -> None:
    ears = Ears()
    assert ears.answer(4, 10) == 0
    for number in (3, 1, 4, 4):
        ears.hear(4, number)
    assert ears.answer(4, 4) == 0b1011
    assert ears.answer(4, 6) == 0b101100
    assert ears.answer(4, 3) == 0b101
    assert ears.answer(5, 4) == 0
    ears.hear(4, 4 + WINDOW)
    assert ears.answer(4, 4 + WINDOW) == 1
    assert ears.answer(4, 4 + 3 * WINDOW) == 0
    ears.hear(4, 4)  # forgotten
    assert ears.answer(4, 4 + WINDOW) == 1


def test_ears_follow_numbers_around_their_end() -> None:
    ears = Ears()
    for number in (0xFFFFFFFE, 0xFFFFFFFF, 0, 1):
        ears.hear(2, number)
    assert ears.answer(2, 1) == 0b1111
