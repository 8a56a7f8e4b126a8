"""Suspicion: three misses running, cleared by any presence, never so many that the others are no quorum (clock-14)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailbound.transport.membership import Suspicion


def test_three_misses_running() -> None:
    suspicion = Suspicion(4, 0, 3, set(range(4)))
    assert suspicion.absent({3}, 10) == set()
    assert suspicion.absent({3}, 11) == set()
    assert suspicion.suspects == frozenset()
    assert suspicion.absent({3}, 12) == {3}
    assert suspicion.suspects == {3}
    assert suspicion.first_missed(3) == 10
    assert suspicion.absent({3}, 13) == set()  # said once


def test_any_row_clears() -> None:
    suspicion = Suspicion(4, 0, 1, set(range(4)))
    suspicion.absent({1})
    suspicion.clear(2)
    assert suspicion.suspects == {1}
    suspicion.clear(1)
    assert suspicion.suspects == frozenset()
    suspicion.absent({1})
    suspicion.absent(set())
    assert suspicion.suspects == frozenset()


def test_when_the_others_would_be_no_quorum_nobody_is_suspect_until_one_is_cleared() -> None:
    suspicion = Suspicion(4, 0, 1, set(range(4)))
    suspicion.absent({1, 2})
    assert suspicion.suspects == frozenset()
    suspicion.clear(1)
    assert suspicion.suspects == {2}


@given(
    ranks=st.integers(2, 9),
    after=st.integers(1, 4),
    stages=st.lists(st.sets(st.integers(0, 8)), max_size=30),
)
def test_suspects_are_those_absent_from_the_last_stages(ranks: int, after: int, stages: list[set[int]]) -> None:
    suspicion = Suspicion(ranks, 0, after, set(range(ranks)))
    for op, absent in enumerate(stages):
        suspicion.absent(absent, op)
    last = stages[-after:]
    missing = set.intersection(*last) if len(last) == after else set()
    expected = {rank for rank in missing if 0 < rank < ranks}
    assert suspicion.suspects == (expected if 2 * len(expected) < ranks else set())
    for rank in expected:
        there = [op for op, absent in enumerate(stages) if rank not in absent]
        assert suspicion.first_missed(rank) == max(there, default=-1) + 1
