"""Every kind of transition that exploring has seen in the udp datapath's tables, done by the kernel program.

One world serves all: its tables are put into the state before, byte by byte.
"""

from __future__ import annotations

import pytest

from interleave.explorer import EVERY_DAY, Walker
from interleave.judged import check_in_pieces, check_kinds, needs_pieces
from interleave.kernel import KernelTables
from interleave.scene import SCENES


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
