"""Whom ranks go by whose digests differ (clock-33)."""

from __future__ import annotations

import pytest

from tailbound.torch.standing import most_held

pytestmark = pytest.mark.needs("torch")


def differs(held: dict[int, bytes], rank: int, step: int, ranks: int) -> bool:
    return held[most_held(held, step, ranks)] != held[rank]


@pytest.mark.parametrize(
    ("held", "unlike"),
    [
        ("aaaa", set()),
        ("abaa", {1}),
        ("baaa", {0}),
        ("abca", {1, 2}),
    ],
)
def test_most_of_the_ranks_decide(held: str, unlike: set[int]) -> None:
    digests = {rank: each.encode() for rank, each in enumerate(held)}
    for step in range(9):
        assert {rank for rank in digests if differs(digests, rank, step, len(held))} == unlike


def test_of_two_ranks_exactly_one_yields_and_not_always_the_same() -> None:
    digests = {0: b"a", 1: b"b"}
    yielded = [[rank for rank in digests if differs(digests, rank, step, 2)] for step in range(4)]
    assert yielded == [[1], [0], [1], [0]]
