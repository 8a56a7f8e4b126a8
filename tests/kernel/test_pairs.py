"""Pairs of actions on two CPUs of the kernel program: what comes of them is what one of the two orders gives.

Rules: kernel-15, kernel-16, kernel-17, kernel-19, kernel-20.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from interleave.explorer import EVERY_DAY, Walker
from interleave.pairing import check, kinds_of_pairs, pairs_of
from interleave.pairs import ROWS, PairTables
from interleave.scene import SCENES

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="missing capability 'two CPUs'")

PARTS = tuple(scene for scene in SCENES if scene != "all")
#: Of the states reached, spread over them, so many in which pairs are done: one of every kind.
OF_THESE = 200
#: All pairs, with ``--thorough``: states reached, and of these so many.
THOROUGH = (20_000, 1000)
#: By how many short rounds one CPU is later than the other.
DELAYS = ((0, 0), (0, 24), (24, 0))


@pytest.fixture
def tables(make, loader: str) -> Iterator[PairTables]:
    made = PairTables(make(source="", sum_rows=ROWS, result_rows=ROWS), loader, Walker().tables.layout)
    yield made
    made.close()


def test_one_of_the_two_orders(tables: PairTables) -> None:
    for scene in PARTS:
        pairs = kinds_of_pairs(scene, EVERY_DAY[scene], OF_THESE)
        assert len(pairs) > 50
        assert check(tables, pairs, DELAYS) > 10, "the second was never first: the test has not met its races"


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scene", PARTS)
def test_every_pair_in_every_state(tables: PairTables, scene: str) -> None:
    check(tables, pairs_of(scene, *THOROUGH), DELAYS)
