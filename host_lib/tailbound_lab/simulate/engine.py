"""The real engine without its thread, and what comes of its ops."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from tailbound.collective.op import Op, Outcome
from tailbound.collective.transpose import Transpose
from tailbound.kernel.core import core
from tailbound.transport.steps import step_of
from tailbound.wire.schema import Ready
from tailbound_lab.simulate.fabric import MS
from tailbound_lab.simulate.machine import Datapath, Heartbeat, readable


class Engine(Transpose):
    """The real engine without its thread.

    Attributes:
        waited: how long the transport thread has waited for a core, ns.
        ended: by the label of an op, rows of each rank that have not come, contributions and results, and whether both
            of its halves ended because nothing was missing.
    """

    waited = 0
    ended: dict[int, tuple[Counter[int], bool]]

    def begin(self) -> None:
        """In place of ``start``."""
        self.ended = {}
        self._rest = self._made([-1, -1, -1])
        cast(Any, self._rest).peek = self._peek
        self._holding._heartbeat.stop()
        self._holding._heartbeat = cast(Any, Heartbeat(len(self.job.peers)))

    def end(self) -> None:
        """In place of ``close``."""
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
            self._window.close()
            self.job.threads.close()

    def _poke(self, what: int = 0) -> None:
        return None

    @property
    def launched(self) -> list[Op]:
        """Ops that have been launched here and are not over."""
        return [op for op in self._ops.values() if op.launch is not None and not op.finished]

    @property
    def idle(self) -> bool:
        """Whether no op is in the engine."""
        return not (self._new or self._window.waiting or self._ops)

    def rest(self, on: bool) -> None:
        """In place of ``hold``."""
        (self._holding.start if on else self._holding.resume)()

    def _deliver(self, op: Op) -> None:
        """Notes, before anything of the op is let go, which rows of whom have not come."""
        if op.launch is not None and not op.delivered:
            self.ended[op.label] = self._missing_of(op), not (op.early or op.outcome.deadline_hits)
        super()._deliver(op)

    def _missing_of(self, op: Op) -> Counter[int]:
        job, placement = self.job, op.place.placement
        missing: Counter[int] = Counter()
        own = int(placement.counts[job.rank])
        summed = job.summed(op)
        lost = np.bincount(placement.owner[op.buffers.source == -1], minlength=job.ranks)
        for peer in job.peers:
            missing[peer] = own - summed[peer] + int(lost[peer])
        return missing

    @property
    def due(self) -> int:
        """When ops are looked at next at the latest, ns."""
        return int(min(self._rest.end, self._rest.soon or self._rest.end))

    def _peek(self) -> int:
        """Looks at queues, in place of descriptors."""
        self._rest.ready = readable(cast(Datapath, self.job.datapath).tables)
        return int(self._rest.ready)

    def _lack(self) -> None:
        """Notes the waits for a core, in place of the kernel."""
        overtime = self.job.overtime
        overtime.latest, overtime.lacked = max(overtime.latest, self.waited - overtime.lacked), self.waited

    def turn(self, now: int) -> int:
        """One turn; when to wake up first after it."""
        self._lack()
        if self._peek() & Ready.EVENTS:
            core().fast.tb_take_opened(self._rest.pointer)
        with self._turn:
            then = self._until(self._poll(now))
        return then if self._peek() else self._first(then)

    def look_out(self, now: int) -> int:
        """A wake-up: when the next one is (0: for a turn, now)."""
        self._peek()
        self._rest.tell()
        with self._turn:
            found = core().fast.tb_look_out(self._rest.pointer, now)
            self._lack()
            return 0 if self._attend(found) else self._first(now)

    def _first(self, now: int) -> int:
        return int(core().fast.tb_first(self._rest.pointer, now))


@dataclass
class Done:
    """A finished op of one rank."""

    label: int
    outcome: Outcome
    launched: int
    finished: int
    missing_of: Counter[int]  #: rows, by rank
    complete: bool  #: both halves ended because nothing was missing
    deadline: int  #: D1 that the rank advertises

    @property
    def expected(self) -> int:
        """Rows, as ``Outcome.expected``."""
        return self.outcome.expected

    @property
    def took(self) -> int:
        """From launch to end, ns."""
        return self.finished - self.launched

    @property
    def step(self) -> int:
        """Step that it belongs to."""
        return step_of(self.label)


@dataclass
class Plan:
    """What every rank trains: sizes of its buckets in entries, and how long forward and backward take, in ns."""

    buckets: tuple[int, ...] = (64 * 256, 64 * 64)
    compute: int = 8 * MS
    gap: int = 2 * MS
    spread: float = 0.2
