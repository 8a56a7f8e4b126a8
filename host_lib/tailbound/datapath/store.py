"""How large a datapath's arrays are, and plain memory with the names, shapes and types of the kernel's maps.

The user gives one number, the MiB of the result ring; the rest follows from it, the payload width and the number of
workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.datapath.protocol import Store
from tailbound.errors import ConfigError
from tailbound.wire import schema
from tailbound.wire.address import words_of
from tailbound.wire.packets import HEADER_DTYPE, layout
from tailbound.wire.schema import HEADER_BYTES, WORKER_MAPS, key_bytes

#: Arrays of a ``Store``; the maps of locks are not among them.
STORE_NAMES = tuple(m.name for m in WORKER_MAPS if m.mmap)
#: Rows in each ring at least: one GSO burst per direction.
MIN_ROWS = 64
_SENDER = HEADER_DTYPE.fields["sender"][1]  # type: ignore[index]

#: ``make(name, dtype, shape)``: zeroed memory for one array.
Make = Callable[[str, np.dtype[Any], tuple[int, ...]], NDArray[Any]]


def ring_rows(ring_mib: float, width: int, workers: int) -> tuple[int, int]:
    """Rows of the two rings for a result ring of ``ring_mib`` MiB.

    The result ring takes every row of an op; for the sums ring see ``sum_ring``. Both are powers of two and at least
    ``MIN_ROWS``.

    Args:
        ring_mib: budget of the result ring in MiB (2**20 bytes).
        width: W, codes (bytes) of a result row; a multiple of ``schema.WIDTH_STEP``.
        workers: world size.

    Returns:
        ``(sum_rows, result_rows)``.

    Raises:
        ConfigError: a budget, width or world size that cannot be.
    """
    _check_width(width)
    budget = ring_mib * 2**20
    if not math.isfinite(budget) or budget < MIN_ROWS * width:
        least = MIN_ROWS * width / 2**20
        raise ConfigError(
            f"a ring of {ring_mib} MiB is below {MIN_ROWS} rows of {width} codes: give at least {least:.2f}"
        )
    result_rows = 1 << (int(budget // width).bit_length() - 1)
    if result_rows >= 1 << 30:
        raise ConfigError(
            f"a ring of {ring_mib} MiB has more than 2**30 rows, too many for serial numbers of 32 bits: give less"
        )
    return sum_ring(result_rows, workers), result_rows


def sum_ring(result_rows: int, workers: int) -> int:
    """Rows of the sums ring of a job whose result ring has ``result_rows``.

    Half of the result ring may be in flight, dealt among the owners, and a peer's window may lag by as much: an owner's
    part of the ring. One owner may be missing, too, since half of the ring dealt among one fewer is no more than that
    part. No larger than needed: a ring that the job goes round is out of the processor's caches for as long as it is.

    Raises:
        ConfigError: a world size that cannot be.
    """
    if not 1 <= workers <= schema.MAX_RANKS:
        raise ConfigError(f"{workers} workers: give 1..{schema.MAX_RANKS}")
    part = -(-result_rows // workers)
    return max(MIN_ROWS, 1 << (part - 1).bit_length())


def layouts(width: int, sum_rows: int, result_rows: int, cpus: int) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Dtype and shape of every worker map, by name.

    Raises:
        ConfigError: the width is no multiple of 64, or a ring no power of two.
    """
    _check_width(width)
    for name, rows in (("sum_rows", sum_rows), ("result_rows", result_rows)):
        if rows <= 0 or rows & (rows - 1):
            raise ConfigError(f"{name} is {rows}: use a power of two")
    sizes = {"width": width, "sum_rows": sum_rows, "result_rows": result_rows, "cpus": cpus}
    return {m.name: layout(m, **sizes, key_bytes=key_bytes(width)) for m in WORKER_MAPS}


def allocate(
    width: int,
    sum_rows: int,
    result_rows: int,
    cpus: int = 1,
    make: Make = lambda name, dtype, shape: np.zeros(shape, dtype),
) -> dict[str, NDArray[Any]]:
    """One array per worker map; ``make`` provides memory of another kind than the heap.

    Raises:
        ConfigError: see ``layouts``.
    """
    return {name: make(name, *shape) for name, shape in layouts(width, sum_rows, result_rows, cpus).items()}


def is_from_peer(peers: NDArray[Any], data: bytes, host: str) -> bool:
    """kernel-8: whether a packet is from the address that ``peers`` has for the rank that it names as its sender."""
    if len(data) < HEADER_BYTES:
        return False
    peer = peers[data[_SENDER]]
    return words_of(host.partition("%")[0]) == (int(peer["address"]), tuple(peer["prefix"].tolist()))


def store_of(arrays: Mapping[str, NDArray[Any]]) -> Store:
    """The ``Store`` over arrays named like the maps (as ``allocate`` makes them)."""
    result_rows, width = arrays["results"].shape
    named = {name: arrays[name] for name in STORE_NAMES}
    return Store(width=width, sum_rows=arrays["sums"].shape[0], result_rows=result_rows, **named)


def _check_width(width: int) -> None:
    if width <= 0 or width % schema.WIDTH_STEP:
        raise ConfigError(f"width of {width} codes: use a positive multiple of {schema.WIDTH_STEP}")
