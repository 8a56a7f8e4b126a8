"""Schedules of all-reduces, executed on symbols: every rank ends with every contribution once."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from tailbound.errors import ConfigError
from tailbound_lab.bench.rivals.schedules import COPY, Schedule, halving_doubling, parameter_server, ring
from tailbound_lab.bench.rivals.stragglar import stragglar

POWERS = (2, 4, 8, 16, 32, 64)
#: Even, and no powers of two; those above 40 take a while.
OTHERS = [
    pytest.param(n, marks=pytest.mark.thorough if n > 40 else ()) for n in range(6, 64, 2) if n not in POWERS
]  # fmt: skip


def execute(n: int, schedule: Schedule) -> None:
    """A chunk is the ranks whose contributions are in it; adding one that is there already would count it twice."""
    chunks = [[1 << rank] * schedule.chunks for rank in range(n)]
    everybody = (1 << n) - 1
    for moves in schedule.rounds:
        sent = [chunks[move.src][move.chunk] for move in moves]
        for (src, dst, chunk, kind), what in zip(moves, sent, strict=True):
            assert src != dst
            if kind == COPY:
                assert what == everybody
                assert chunks[dst][chunk] != everybody, "it had that already"
                chunks[dst][chunk] = what
            else:
                assert not chunks[dst][chunk] & what
                chunks[dst][chunk] |= what
    assert chunks == [[everybody] * schedule.chunks] * n


def one_each_way(schedule: Schedule) -> bool:
    """Whether no rank sends or receives more than one chunk a round."""
    return all(
        max(Counter(m[end] for m in moves).values(), default=0) <= 1 for moves in schedule.rounds for end in (0, 1)
    )


@pytest.mark.parametrize("n", [*POWERS, *OTHERS])
def test_stragglar_gives_every_rank_the_exact_sum(n: int) -> None:
    schedule = stragglar(n, n - 1)
    execute(n, schedule)
    assert one_each_way(schedule)
    assert schedule.chunks == n - 1
    late = len(schedule.rounds) - (n - 2)
    assert not any(n - 1 in move[:2] for moves in schedule.rounds[: n - 2] for move in moves)  # it is not there yet
    least = n + math.ceil(math.log2(n)) - 2
    assert late == least if n in POWERS else least <= late <= least + 2


@pytest.mark.parametrize("n", [3, 4, 6, 8])
def test_anybody_may_be_the_straggler(n: int) -> None:
    for straggler in range(n):
        schedule = stragglar(n, straggler)
        execute(n, schedule)
        assert one_each_way(schedule)
        assert not any(straggler in move[:2] for moves in schedule.rounds[: n - 2] for move in moves)


@pytest.mark.parametrize("n", [2, 3, 7, 8, 64])
def test_a_ring_takes_two_rounds_a_rank_but_one(n: int) -> None:
    schedule = ring(n)
    execute(n, schedule)
    assert one_each_way(schedule)
    assert (schedule.chunks, len(schedule.rounds)) == (n, 2 * (n - 1))


@pytest.mark.parametrize("n", POWERS)
def test_halving_doubling_sends_as_much_as_a_ring_in_fewer_rounds(n: int) -> None:
    schedule = halving_doubling(n)
    execute(n, schedule)
    assert len(schedule.rounds) == 2 * math.log2(n)
    for moves in schedule.rounds:
        assert all(m.dst == other.dst for m in moves for other in moves if m.src == other.src)
    sent = Counter(m.src for moves in schedule.rounds for m in moves)
    assert set(sent.values()) == {2 * (n - 1)}


@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_parameter_server_returns_a_chunk_while_the_next_one_comes(n: int) -> None:
    schedule = parameter_server(n)
    execute(n, schedule)
    assert len(schedule.rounds) == schedule.chunks + 1
    assert all(move.src == 0 or move.dst == 0 for moves in schedule.rounds for move in moves)


def test_what_there_is_no_schedule_for_is_refused() -> None:
    for wrong in (lambda: halving_doubling(6), lambda: stragglar(1, 0), lambda: stragglar(4, 4)):
        with pytest.raises(ConfigError):
            wrong()
