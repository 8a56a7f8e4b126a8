"""Rows and bytes for a memory budget, and memory like the kernel's maps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.datapath.store import MIN_ROWS, STORE_NAMES, allocate, layouts, ring_rows, store_of
from tailbound.errors import ConfigError
from tailbound.wire import schema
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import MAX_RANKS, OP_RING, WORKER_MAPS

widths = st.integers(1, 139).map(lambda k: k * schema.WIDTH_STEP)


@given(mib=st.floats(1, 1024), width=widths, workers=st.integers(1, schema.MAX_RANKS))
def test_rings_fit_the_budget_and_hold_an_owners_share(mib: float, width: int, workers: int) -> None:
    sum_rows, result_rows = ring_rows(mib, width, workers)
    for rows in (sum_rows, result_rows):
        assert rows >= MIN_ROWS
        assert rows & (rows - 1) == 0
    assert result_rows * width <= mib * 2**20 < 2 * result_rows * width
    assert sum_rows * workers >= result_rows
    assert sum_rows == MIN_ROWS or sum_rows // 2 * workers < result_rows
    if workers > 1:  # half of the ring in flight, and one owner missing
        assert sum_rows * (workers - 1) >= result_rows // 2


@pytest.mark.parametrize("mib", [0, -1, 0.01, float("nan"), float("inf"), 2.0**40])
def test_a_ring_that_cannot_be_is_refused(mib: float) -> None:
    with pytest.raises(ConfigError, match="ring of"):
        ring_rows(mib, 1408, 4)


@pytest.mark.parametrize("width", [0, -64, 100, 1500])
def test_a_width_that_cannot_be_is_refused(width: int) -> None:
    with pytest.raises(ConfigError, match="width"):
        ring_rows(8, width, 4)
    with pytest.raises(ConfigError, match="width"):
        allocate(width, 64, 64)


@pytest.mark.parametrize("workers", [0, -1, 257])
def test_a_world_size_that_cannot_be_is_refused(workers: int) -> None:
    with pytest.raises(ConfigError, match="workers"):
        ring_rows(8, 1408, workers)


def test_every_map_has_an_array_of_its_size() -> None:
    arrays = allocate(1408, 64, 256, cpus=3)
    assert list(arrays) == [m.name for m in WORKER_MAPS]
    shapes = {name: (a.shape, a.dtype) for name, a in arrays.items()}
    assert shapes["sums"] == ((64, 2816), np.uint8)
    assert shapes["results"] == ((256, 1408), np.uint8)
    assert shapes["ledger"] == ((3 * (MAX_RANKS + 1),), DTYPES["tb_ledger"])
    assert shapes["arrivals"] == ((OP_RING * MAX_RANKS,), DTYPES["tb_arrival"])
    assert shapes["slot_locks"] == ((64,), DTYPES["tb_slot_lock"])
    assert shapes["control"] == ((1,), DTYPES["tb_control"])
    assert all(not a.view(np.uint8).any() for a in arrays.values())


def test_the_store_shares_the_arrays() -> None:
    arrays = allocate(64, 16, 32)
    store = store_of(arrays)
    assert (store.width, store.sum_rows, store.result_rows) == (64, 16, 32)
    assert all(getattr(store, name) is arrays[name] for name in STORE_NAMES)
    assert not any(name.endswith("_locks") for name in STORE_NAMES)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((0, 16, 16), "width of 0"),
        ((1400, 16, 16), "width of 1400"),
        ((64, 15, 16), "sum_rows is 15"),
        ((64, 0, 16), "sum_rows is 0"),
        ((64, 16, 48), "result_rows is 48"),
        ((64, 16, -16), "result_rows is -16"),
    ],
)
def test_sizes_that_cannot_be(sizes: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        layouts(*sizes, cpus=1)
