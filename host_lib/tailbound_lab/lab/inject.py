"""The fault programs of a lab: one on each end of every cable, with settings and counters of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from tailbound_lab.lab import namespaces
from tailbound_lab.lab.fault_program import FaultProgram, FaultSettings
from tailbound_lab.lab.faults import Fault, FaultCounts, Way, end_settings
from tailbound_lab.lab.topology import LINKS, Link, Topology


class _End(NamedTuple):
    """One fault program and what tells it from the others."""

    rank: int
    link: Link
    number: int  # 0: packets from the worker, 1: packets to the worker
    program: FaultProgram


class Injector:
    """Fault programs on all cables of a built topology, until closed.

    Args:
        fault: what they do at first.
        seed: of all their generators.
        queue: bytes that wait before every worker's link at most, and above how many of them packets are marked (0:
            none are), once ``set_rate`` says how fast it is; None: as many as the cable takes.

    Raises:
        CapabilityError: compiler, privilege or kernel feature missing.
        AttachError: an interface refuses; nothing stays attached.
    """

    def __init__(self, topology: Topology, fault: Fault, seed: int, queue: tuple[int, int] | None = None) -> None:
        self._seed, self._queue = seed, queue
        self._rates: dict[tuple[int, Link], int] = {}  # bytes per second, by worker and link
        self._settings: dict[_End, FaultSettings] = {}
        self._ends: list[_End] = []
        try:
            for rank in range(len(topology.cables)):
                for link in LINKS:
                    self._add(topology, rank, link)
            self.set(fault)
        except BaseException:
            self.close()
            raise

    def _add(self, topology: Topology, rank: int, link: Link) -> None:
        ends = topology.cable_ends(rank, link)
        for number, (namespace, interface) in enumerate(ends):
            program = FaultProgram()
            self._ends.append(_End(rank, link, number, program))
            # duplicates leave by the other port; the device map takes its index as seen from inside
            namespaces.call(namespace, program.attach, interface, ends[1 - number][1], patient=True)

    def _select(self, rank: int | None, link: Link | None) -> Iterator[_End]:
        for end in self._ends:
            if rank in (None, end.rank) and link in (None, end.link):
                yield end

    def set(self, fault: Fault, rank: int | None = None, link: Link | None = None, way: Way | None = None) -> None:
        """New settings, and generators in their first state, for one worker's cable or all, one link or both.

        ``way``: only in this direction, and all of the probability at this one end.
        """
        for end in self._select(rank, link):
            if way is None or end.number == way.value:
                seed = (self._seed, LINKS.index(end.link), end.rank, end.number)
                self._settings[end] = end_settings(fault, *seed, alone=way is not None)
                self._tell(end)

    def set_rate(self, rank: int, link: Link, rate: int | None) -> None:
        """A worker's link now has ``rate`` bit/s; its queue is empty. None: no limit, and no queue."""
        self._rates[rank, link] = (rate or 0) // 8
        for end in self._select(rank, link):
            self._tell(end)

    def _tell(self, end: _End) -> None:
        settings, rate = self._settings[end], self._rates.get((end.rank, end.link), 0)
        if self._queue is not None and end.number == Way.TO_WORKER.value:
            settings = replace(settings, rate=rate, queue=self._queue[0], mark=self._queue[1])
        end.program.set(settings)

    def counts(self, rank: int | None = None, link: Link | None = None) -> FaultCounts:
        """Sum over one worker's cable or all, one link or both, from building on."""
        total = FaultCounts()
        for end in self._select(rank, link):
            counts = end.program.counts()
            sent = counts["seen"] if end.number == Way.FROM_WORKER.value else 0
            total += FaultCounts(**counts, sent=sent)
        return total

    def close(self) -> None:
        """Detach everywhere; may be called twice."""
        for end in self._ends:
            end.program.close()
        self._ends.clear()
