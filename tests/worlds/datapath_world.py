"""The world of ``cases`` in either datapath: the state before a case, and the moves of host and peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cases
from tailbound.datapath.protocol import Store
from tailbound.wire.address import words_of
from tailbound.wire.schema import HEADER_BYTES, Verdict, op_slot


class DatapathWorld:
    """What the worlds of the kernel and of the udp datapath have in common.

    Each has ``seal(op, seq, rows)`` and ``put_key(epoch, key)`` as a host does, and ``events()`` since the last call as
    (kind, op, ns). Its ``ledger()`` counts by sender and verdict. ``receive(data, source)`` takes a UDP payload that
    comes from a rank.

    Attributes:
        arrays: the datapath's memory by the names of its maps.
    """

    store: Store
    arrays: dict[str, NDArray[Any]]
    ipv6: bool
    ranks: int
    seal: Callable[[int, int, int], None]
    put_key: Callable[[int, NDArray[np.uint64]], None]
    events: Callable[[], list[tuple[int, int, int]]]
    ledger: Callable[[], NDArray[np.uint64]]
    receive: Callable[[bytes, int], None]

    def populate(self, ranks: int, registered: Any = None) -> None:
        """The state that cases begin with; the ranks in ``registered`` have addresses, by default all."""
        self.ranks = ranks
        self.seal(cases.FIRST_OP - 1, 0, self.store.sum_rows)
        for rank in range(ranks):
            if rank != cases.RANK and (registered is None or rank in registered):
                address, prefix = words_of(cases.ip_of(rank, ipv6=self.ipv6))
                self.store.peers[rank] = (address, 1, prefix, 0)
        own = words_of(cases.ip_of(cases.RANK, ipv6=self.ipv6))._asdict()
        self.control(**cases.control_values(ranks) | {"sum_rows": self.store.sum_rows} | own)

    def prepare(self, case: cases.Case, *, armed: bool = False) -> None:
        """Brings a new world to right before the case's packet."""
        if armed:
            self.arm()
        if case.expect_results:
            self.store.expect_results[op_slot(case.expect_results[0])] = case.expect_results
        for packet in case.before:
            self.take(packet)
        if case.sealed:
            self.seal(*case.sealed)
        self.control(**case.control)
        self.events()

    def control(self, **values: Any) -> None:
        """Changes fields of the control record."""
        for name, value in values.items():
            self.store.control[name][0] = value

    def arm(self) -> None:
        """From now on packets carry tags by ``cases.KEYS``."""
        for epoch, key in enumerate(cases.KEYS):
            self.put_key(epoch, key)
        self.control(tagged=1)

    def sender_of(self, data: bytes) -> int:
        """The peer that a payload names, or rank 1."""
        named = data[14] if len(data) >= HEADER_BYTES else 1
        return named if 0 < named < self.ranks else 1

    def take(self, data: bytes, source: int | None = None) -> tuple[Verdict, int]:
        """One UDP payload, from the peer that it names unless told otherwise: its verdict and its ledger row."""
        before = self.ledger()
        self.receive(data, self.sender_of(data) if source is None else source)
        return cases.judged(self.ledger() - before)

    def counted(self) -> dict[Verdict, int]:
        """Counters by verdict that are not zero."""
        return {Verdict(i): int(n) for i, n in enumerate(self.ledger().sum(0)) if n}

    def lanes(self, slot: int, count: int) -> NDArray[np.uint16]:
        """The sums of the first ``count`` codes of a slot, in the order of the codes."""
        lanes = self.store.sums[slot].view(np.uint16).reshape(-1, 2, 4)
        return lanes.transpose(0, 2, 1).reshape(-1)[:count].copy()


def same_memory(one: DatapathWorld, other: DatapathWorld) -> None:
    """Asserts that two datapaths hold the same bytes, times of day aside; a scale may be no number."""
    for name in ("slots", "sums", "results", "result_records", "presence"):
        ours, theirs = (getattr(world.store, name).view(np.uint8) for world in (one, other))
        assert np.array_equal(ours, theirs), name
    for name in ("ops", "peer_states"):
        ours, theirs = getattr(one.store, name), getattr(other.store, name)
        for field in ours.dtype.names:
            if field in ("last_ns", "rtt_ns", "opened_ns", "majority_ns"):
                assert np.array_equal(ours[field] != 0, theirs[field] != 0), f"{name}.{field}"
            else:
                assert np.array_equal(ours[field], theirs[field]), f"{name}.{field}"
    stamps = [world.store.arrivals.view(np.uint32) != 0 for world in (one, other)]  # of each, all fields in turn
    assert np.array_equal(*stamps), f"arrivals: {np.flatnonzero(stamps[0] != stamps[1])}"
