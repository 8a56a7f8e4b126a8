"""Owners and sending order: codec-2."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.codec.owners import OwnerMap, Placement, first_place, place
from tailbound.codec.shape import shape_for
from tailbound.errors import ConfigError


def dealt(numel: int, ranks: int, width: int = 1408) -> Placement:
    return place(shape_for(numel, width), OwnerMap(1, tuple(range(ranks))), ranks)


@given(st.integers(1, 3_000_000), st.integers(1, 256), st.data())
def test_arrays_agree(numel: int, ranks: int, data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks))
    shape = shape_for(numel, 1408)
    p = place(shape, OwnerMap(7, tuple(owners)), ranks)
    k = np.arange(shape.rows)
    assert np.array_equal(p.owner, np.array(owners)[k % len(owners)])
    assert np.array_equal(p.position, p.starts[p.owner] + p.place)
    assert np.array_equal(p.row_at[p.position], k)
    assert p.counts.sum() == shape.rows
    for owner in owners:
        rows = p.rows_of(owner)
        assert np.array_equal(p.place[rows], np.arange(p.counts[owner]))
        order = [(int(row) % shape.group_rows, int(row) // shape.group_rows) for row in rows]
        assert order == sorted(order)
    assert not any(p.counts[rank] for rank in range(ranks) if rank not in owners)


@pytest.mark.parametrize("ranks", [2, 5, 48])
def test_cut_tail_takes_groups_in_turn(ranks: int) -> None:
    """Whoever sends, and wherever it begins; with a dead owner all of its rows are lost."""
    p = dealt(6553600, ranks)
    owner = 1
    rows = p.rows_of(owner)
    for sender in {0, 2 % ranks, ranks // 2, ranks - 1} - {owner}:
        sent = np.roll(rows, -first_place(p, owner, sender, ranks))
        for cut in {1, len(rows) // 50, len(rows) // 7, len(rows) // 2, len(rows) - 1, len(rows)}:
            lost = np.bincount(sent[len(rows) - cut :] // 64, minlength=p.shape.groups)
            assert lost.max() - lost.min() <= 1


def test_senders_begin_apart() -> None:
    p = dealt(6553600, 4)
    for owner in range(4):
        firsts = [first_place(p, owner, sender, 4) for sender in range(4) if sender != owner]
        gaps = np.diff(sorted(firsts))
        assert min(firsts) == 0
        assert min(gaps) >= p.shape.groups


def test_who_begins_at_the_beginning() -> None:
    """The only peer; ranks of which there are more than rows of a group; and all who send to a switch."""
    assert first_place(dealt(6553600, 2), 0, 1, 2) == 0
    assert first_place(dealt(6553600, 48), 0, 40, 48) == 0
    switched = place(shape_for(6553600, 1408), OwnerMap(1, (4,)), 5)
    assert [first_place(switched, 4, sender, 4) for sender in range(4)] == [0] * 4


@pytest.mark.parametrize(("owners", "ranks"), [((), 4), ((4,), 4), ((-1,), 4), ((0,), 0), ((0,), 257)])
def test_bad_maps_are_refused(owners: tuple[int, ...], ranks: int) -> None:
    with pytest.raises(ConfigError):
        place(shape_for(1000, 1408), OwnerMap(1, owners), ranks)
