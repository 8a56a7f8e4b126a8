"""Transitions that exploring has seen in the udp datapath's tables, by the kernel program, alone and on two CPUs.

Rules: kernel-15, kernel-16, kernel-17, kernel-19, kernel-20.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from interleave.explorer import EVERY_DAY, Walker
from interleave.judged import check_in_pieces, check_kinds, needs_pieces
from interleave.kernel import KernelTables
from interleave.pairing import check, kinds_of_pairs, pairs_of
from interleave.pairs import ROWS, PairTables
from interleave.scene import SCENES

# -- every kind of transition; one world serves all, its tables are put into the state before --------------------------


@pytest.fixture
def tables(make) -> KernelTables:
    return KernelTables(make(), Walker().tables.layout)


def test_every_kind_of_transition(tables: KernelTables) -> None:
    """Rules: kernel-12, kernel-14, kernel-15, kernel-16, kernel-17."""
    for scene in SCENES:
        check_kinds(tables, scene, EVERY_DAY[scene])


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scene", SCENES)
def test_every_kind_of_many_more_states(tables: KernelTables, scene: str) -> None:
    check_kinds(tables, scene, 20 * EVERY_DAY[scene])


def test_in_pieces_nothing_happens(tables: KernelTables) -> None:
    """Rules: kernel-2, kernel-21."""
    with needs_pieces():
        check_in_pieces(tables)


# -- pairs of actions on two CPUs: what comes of them is what one of the two orders gives ------------------------------


two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="missing capability 'two CPUs'")

PARTS = tuple(scene for scene in SCENES if scene != "all")
#: Of the states reached, spread over them, so many in which pairs are done: one of every kind.
OF_THESE = 200
#: All pairs, with ``--thorough``: states reached, and of these so many.
THOROUGH = (20_000, 1000)
#: By how many short rounds one CPU is later than the other.
DELAYS = ((0, 0), (0, 24), (24, 0))


@pytest.fixture
def pair_tables(make, loader: str) -> Iterator[PairTables]:
    made = PairTables(make(source="", sum_rows=ROWS, result_rows=ROWS), loader, Walker().tables.layout)
    yield made
    made.close()


@two_cpus
def test_one_of_the_two_orders(pair_tables: PairTables) -> None:
    for scene in PARTS:
        pairs = kinds_of_pairs(scene, EVERY_DAY[scene], OF_THESE)
        assert len(pairs) > 50
        assert check(pair_tables, pairs, DELAYS) > 10, "the second was never first: the test has not met its races"


@two_cpus
@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scene", PARTS)
def test_every_pair_in_every_state(pair_tables: PairTables, scene: str) -> None:
    check(pair_tables, pairs_of(scene, *THOROUGH), DELAYS)
