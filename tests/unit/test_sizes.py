"""Rows and bytes for a memory budget."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.datapath.sizes import MIN_ROWS, memory, ring_rows
from tailbound.errors import ConfigError
from tailbound.wire import schema

widths = st.integers(1, 139).map(lambda k: k * schema.WIDTH_STEP)


def test_the_example_of_the_design() -> None:
    assert ring_rows(8, 1408, 4) == (1024, 4096)
    assert ring_rows(8, 1408, 2) == (2048, 4096)
    assert ring_rows(8, 1408, 1) == (4096, 4096)
    assert ring_rows(32, 1408, 9) == (2048, 16384)


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
        memory(64, 64, width, 2)


@pytest.mark.parametrize("workers", [0, -1, 257])
def test_a_world_size_that_cannot_be_is_refused(workers: int) -> None:
    with pytest.raises(ConfigError, match="workers"):
        ring_rows(8, 1408, workers)


def test_memory_counts_every_map_once() -> None:
    sizes = memory(2048, 4096, 1408, 2)
    assert set(sizes) == {m.name for m in schema.WORKER_MAPS} | {"events"}
    assert sizes["sums"] == 2048 * 2 * 1408
    assert sizes["results"] == 4096 * 1408
    assert sizes["ledger"] == -(-2 * 257 * 64 * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
    assert sizes["arrivals"] == schema.OP_RING * schema.MAX_RANKS * 16
    assert sizes["events"] == schema.EVENT_RING_BYTES


def test_memory_is_bounded_by_ring_and_cpus() -> None:
    small, large = memory(*ring_rows(8, 1408, 4), 1408, 2), memory(*ring_rows(64, 1408, 4), 1408, 2)
    grows = {name for name in small if large[name] > small[name]}
    assert grows == {"expect", "slots", "sums", "results", "result_records", "presence", "slot_locks", "result_locks"}
    assert sum(memory(2048, 4096, 1408, 64).values()) - sum(memory(2048, 4096, 1408, 2).values()) < 16 * 2**20
    with pytest.raises(ConfigError, match="cpus 0"):
        memory(2048, 4096, 1408, 0)
