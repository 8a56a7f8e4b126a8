"""What a datapath is: memory that fills by itself, a way to seal it, and something to wait on.

The collective reads and writes the arrays of a ``Store``. XDP programs in the kernel fill them, or a thread in the C
library, by the same rules and to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tailbound.transport.sockets import UdpSocket


@dataclass(frozen=True)
class Store:
    """Arrays named and typed like the maps of ``wire.schema.WORKER_MAPS`` (dtypes: ``wire.packets.DTYPES``).

    Written by the host: ``control`` [1], ``peers`` [256], ``expect_results`` [OP_RING].
    Read only: ``slots`` [sum_rows], ``sums`` u8[sum_rows, 2 * width] (lane order: see ``codec``), ``results``
    u8[result_rows, width], ``result_records`` and ``presence`` [result_rows], ``ops`` [OP_RING], ``arrivals``
    [OP_RING * 256], ``peer_states`` [256], ``ledger`` [cpus * 257]. Ring sizes are powers of two.
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


class EventRecord(NamedTuple):
    """One event: ``kind`` is a ``schema.Event``; a hint only."""

    kind: int
    op: int
    ns: int


class Datapath(Protocol):
    """Receives and sums; sending is the sender's (``transport.sender``), over sockets of its own."""

    name: str
    #: that packets come over; empty: any
    interface: str
    store: Store
    #: of the control record, when packets are let in
    active: int
    #: bound to the job's port; control packets come in here, and the sender may share it
    socket: UdpSocket

    @property
    def endpoint(self) -> tuple[str, int]:
        """IP address and UDP port at which peers reach this rank."""

    def sending(self, peers: int, ports: int = 0) -> list[UdpSocket]:
        """Sockets for the sender (``transport.sender.Sender``), ``socket`` first; ``close`` closes them.

        Args:
            peers: ranks that are sent to.
            ports: source ports of the bursts to one peer, at most; 0: as many as are useful.
        """

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

    def seal(self, op: int, seq: int, rows: int) -> None:
        """Makes contributions to ``rows`` slots from row sequence ``seq`` late for ``op`` and everything older.

        When it returns, nobody is adding to them for that op.
        """

    def put_key(self, epoch: int, key: NDArray[np.uint64]) -> None:
        """``key`` (``wire.tag``, for rows of the store's width) is in force, in the place of that two epochs before.

        Raises:
            CapabilityError: this datapath cannot take packets with tags.
        """

    def fds(self) -> tuple[int, int]:
        """File descriptors that become readable when there are events, and when there are control packets."""

    def events(self) -> list[EventRecord]:
        """Events since the last call; never blocks."""

    def control_packets(self) -> list[bytes]:
        """UDP payloads (header and body) of control packets since the last call, unverified; never blocks."""

    def fence(self) -> None:
        """Full memory barrier between reading ``presence`` and reading the rows it names."""

    def close(self) -> None:
        """Detaches, unmaps and closes; may be called twice."""
