"""Memory like the kernel's maps."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from tailbound.datapath.store import STORE_NAMES, allocate, check_sizes, store_of
from tailbound.errors import ConfigError
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import MAX_RANKS, OP_RING, WORKER_MAPS


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


def test_memory_of_another_kind() -> None:
    def make(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        size = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)

    arrays = allocate(64, 16, 32, make=make)
    assert isinstance(arrays["sums"].base.base, np.ndarray | memoryview | mmap.mmap)
    arrays["control"]["active"] = 1
    assert store_of(arrays).control["active"][0] == 1


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
        check_sizes(*sizes)
