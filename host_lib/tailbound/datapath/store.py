"""Plain memory with the names, shapes and types of the kernel's maps, made from ``wire.schema.WORKER_MAPS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.datapath.protocol import Store
from tailbound.errors import ConfigError
from tailbound.wire import schema
from tailbound.wire.packets import layout
from tailbound.wire.schema import WORKER_MAPS

#: Arrays of a ``Store``; the maps of locks are not among them.
STORE_NAMES = tuple(m.name for m in WORKER_MAPS if m.mmap)

#: ``make(name, dtype, shape)``: zeroed memory for one array.
Make = Callable[[str, np.dtype[Any], tuple[int, ...]], NDArray[Any]]


def check_sizes(width: int, sum_rows: int, result_rows: int) -> None:
    """Refuses sizes no datapath takes.

    Raises:
        ConfigError: the width is no multiple of 64, or a ring no power of two.
    """
    if width <= 0 or width % schema.WIDTH_STEP:
        raise ConfigError(f"width of {width} codes: use a positive multiple of {schema.WIDTH_STEP}")
    for name, rows in (("sum_rows", sum_rows), ("result_rows", result_rows)):
        if rows <= 0 or rows & (rows - 1):
            raise ConfigError(f"{name} is {rows}: use a power of two")


def _zeros(_: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    return np.zeros(shape, dtype)


def allocate(
    width: int, sum_rows: int, result_rows: int, cpus: int = 1, make: Make = _zeros
) -> dict[str, NDArray[Any]]:
    """One array per worker map; ``make`` provides memory of another kind than the heap.

    Raises:
        ConfigError: see ``check_sizes``.
    """
    check_sizes(width, sum_rows, result_rows)
    sizes = {"width": width, "sum_rows": sum_rows, "result_rows": result_rows, "cpus": cpus}
    return {m.name: make(m.name, *layout(m, **sizes)) for m in WORKER_MAPS}


def store_of(arrays: Mapping[str, NDArray[Any]]) -> Store:
    """The ``Store`` over arrays named like the maps (as ``allocate`` makes them)."""
    return Store(
        width=arrays["results"].shape[1],
        sum_rows=arrays["sums"].shape[0],
        result_rows=arrays["results"].shape[0],
        **{name: arrays[name] for name in STORE_NAMES},
    )
