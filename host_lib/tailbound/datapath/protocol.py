"""What a datapath is: memory that fills by itself, a way to seal it, and something to wait on.

The collective reads and writes the arrays of a ``Store``. XDP programs in the kernel fill them, or a thread in the C
library, by the same rules and to the same bits. The user gives one number, the MiB of the result ring; the sizes of all
arrays follow from it, the payload width and the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import ConfigError
from tailbound.kernel.events import Source
from tailbound.transport.sockets import UdpSocket
from tailbound.wire import schema
from tailbound.wire.packets import layout
from tailbound.wire.schema import WORKER_MAPS, key_bytes

#: Rows in each ring at least: one GSO burst per direction.
MIN_ROWS = 64


@dataclass(frozen=True)
class Store:
    """Arrays named and typed like the maps of ``wire.schema.WORKER_MAPS`` (dtypes: ``wire.packets.DTYPES``).

    Written by the host: ``control`` [1], ``peers`` [256], ``expect_results`` [OP_RING], old marks in ``peer_states``.
    Read only: ``slots`` [sum_rows], ``sums`` u8[sum_rows, 2 * width] (lane order: see ``codec``), ``results``
    u8[result_rows, width], ``result_records`` and ``presence`` [result_rows], ``ops`` [OP_RING], ``arrivals``
    [OP_RING * 256], ``peer_states`` [256] else, ``ledger`` [cpus * 257]. Ring sizes are powers of two.
    """

    width: int
    sum_rows: int
    result_rows: int
    control: NDArray[Any]
    peers: NDArray[Any]
    expect_results: NDArray[Any]
    slots: NDArray[Any]
    sums: NDArray[np.uint8]
    results: NDArray[np.uint8]
    result_records: NDArray[Any]
    presence: NDArray[Any]
    ops: NDArray[Any]
    arrivals: NDArray[Any]
    peer_states: NDArray[Any]
    ledger: NDArray[Any]


class Datapath(Protocol):
    """Receives and sums; sending is the sender's (``transport.sender``), over sockets of its own."""

    name: str
    #: that packets come over; empty: any
    interface: str
    store: Store
    #: of the control record, when packets are let in
    active: int
    #: where events come from, which are hints only (``schema.Event``), and who seals
    source: Source
    #: bound to the job's port; control packets come in here, and the sender may share it
    socket: UdpSocket

    @property
    def endpoint(self) -> tuple[str, int]:
        """IP address and UDP port at which peers reach this rank."""

    def sending(self, peers: int) -> list[UdpSocket]:
        """Sockets to send to so many ``peers`` over (``transport.sender``), ``socket`` first; ``close`` closes them."""

    @property
    def gap(self) -> int:
        """ns from one burst that this rank sends to its next (``transport.pace.Pacer``); 0 where none is needed."""

    @property
    def lost_on_arrival(self) -> Mapping[str, int]:
        """Packets that this host lost before any rule saw them, by place, as far as this datapath knows."""

    @property
    def withdrawn(self) -> bool:
        """Whether somebody has taken away what receives here, so that nothing comes any more; cheap to ask."""

    def reset(self, first_op: int) -> None:
        """Waits for packets let in while a job was active, then seals every slot below ``first_op``."""

    def put_key(self, epoch: int, key: NDArray[np.uint64]) -> None:
        """``key`` (``wire.tag``, for rows of the store's width) is in force, in the place of that two epochs before.

        Raises:
            CapabilityError: this datapath cannot take packets with tags.
        """

    def fds(self) -> tuple[int, int]:
        """File descriptors that become readable when there are events, and when there are control packets."""

    def close(self) -> None:
        """Detaches, unmaps and closes; may be called twice."""


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


def sum_ring(result_rows: int, workers: int, least: int = MIN_ROWS) -> int:
    """Rows of the sums ring of a job whose result ring has ``result_rows``; so many at ``least``.

    Half of the result ring may be in flight, dealt among the owners, and a peer's window may lag by as much: an owner's
    part of the ring. One owner may be missing, too, since half of the ring dealt among one fewer is no more than that
    part. No larger than needed: a ring that the job goes round is out of the processor's caches for as long as it is.

    Raises:
        ConfigError: a world size that cannot be.
    """
    if not 1 <= workers <= schema.MAX_RANKS:
        raise ConfigError(f"{workers} workers: give 1..{schema.MAX_RANKS}")
    part = -(-result_rows // workers)
    return max(least, 1 << (part - 1).bit_length())


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


def allocate(width: int, sum_rows: int, result_rows: int) -> dict[str, NDArray[Any]]:
    """Zeroed memory for every worker map, by name, where one thread counts for all processors.

    Raises:
        ConfigError: see ``layouts``.
    """
    sizes = layouts(width, sum_rows, result_rows, cpus=1)
    return {name: np.zeros(dims, dtype) for name, (dtype, dims) in sizes.items()}


def store_of(arrays: Mapping[str, NDArray[Any]]) -> Store:
    """The ``Store`` over arrays named like the maps (as ``allocate`` makes them)."""
    result_rows, width = arrays["results"].shape
    named = {m.name: arrays[m.name] for m in WORKER_MAPS if m.mmap}  # but for the maps of locks
    return Store(width=width, sum_rows=arrays["sums"].shape[0], result_rows=result_rows, **named)


def _check_width(width: int) -> None:
    if width <= 0 or width % schema.WIDTH_STEP:
        raise ConfigError(f"width of {width} codes: use a positive multiple of {schema.WIDTH_STEP}")
