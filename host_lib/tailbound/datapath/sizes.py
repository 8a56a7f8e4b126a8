"""How many rows a memory budget holds, and what every map costs: pure arithmetic, shared by engine and doctor.

The user gives one number, the MiB of the result ring; everything else follows from it, the payload width and the
number of workers. Nothing here touches the kernel.
"""

from __future__ import annotations

import math
import mmap

from tailbound.errors import ConfigError
from tailbound.wire import schema
from tailbound.wire.packets import layout

__all__ = ["MIN_ROWS", "memory", "ring_rows", "sum_ring"]

#: Rows in each ring at least: one GSO burst per direction.
MIN_ROWS = 64


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
        raise ConfigError(f"{workers} workers is outside 1..{schema.MAX_RANKS}")
    part = -(-result_rows // workers)
    return max(MIN_ROWS, 1 << (part - 1).bit_length())


def memory(sum_rows: int, result_rows: int, width: int, cpus: int) -> dict[str, int]:
    """Kernel memory of one worker, in bytes by map name, the event ring included, and nothing that grows later.

    Values of a BPF array take a multiple of 8 bytes, mmapped arrays whole pages.

    Raises:
        ConfigError: sizes that no map can have.
    """
    _check_width(width)
    if min(sum_rows, result_rows, cpus) < 1:
        raise ConfigError(f"sum_rows {sum_rows}, result_rows {result_rows} and cpus {cpus} must all be at least 1")
    out = {}
    for entry in schema.WORKER_MAPS:
        dtype, (count, *columns) = layout(entry, sum_rows=sum_rows, result_rows=result_rows, width=width, cpus=cpus)
        size = -(-dtype.itemsize * math.prod(columns) // 8) * 8 * count
        out[entry.name] = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE if entry.mmap else size
    out["events"] = schema.EVENT_RING_BYTES
    return out


def _check_width(width: int) -> None:
    if width < schema.WIDTH_STEP or width % schema.WIDTH_STEP:
        raise ConfigError(f"width {width} is not a positive multiple of {schema.WIDTH_STEP}")
