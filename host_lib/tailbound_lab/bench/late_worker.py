"""One rank of ``tailbound bench late``: every way to average in turn, the last rank coming late to each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tailbound.collective.communicator import Communicator
from tailbound_lab.bench.channel import Channel, serve
from tailbound_lab.bench.join import communicator, gathered
from tailbound_lab.bench.late import BOUNDED, OVER_TCP, STRICT, WAYS, warm_ups
from tailbound_lab.bench.rivals.choose import averager
from tailbound_lab.bench.start import StartLine
from tailbound_lab.bench.worker import gradient, totals

#: All-reduces before those that count and before ``warm_ups``: nobody is late, so that deadlines are learned.
_CALM = 24
#: Longer than any delay (``late.MOST_MS``) and transfer.
_PATIENT_NS = 1_900_000_000
_SETTINGS: dict[str, dict[str, Any]] = {STRICT: {"deadline_1": _PATIENT_NS, "deadline_2": _PATIENT_NS}, BOUNDED: {}}
#: Turns that each of ours takes, in alternating order; the iterations are dealt among them.
_TURNS = 2


class _Rank:
    """This rank's data, and one all-reduce at a time."""

    def __init__(self, size: int, delay_ms: float, line: StartLine) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._data = gradient(size, dist.get_rank())
        self._out = np.zeros_like(self._data)
        self._buffer = torch.zeros(self._data.size)
        self._delay = delay_ms / 1e3 if dist.get_rank() == dist.get_world_size() - 1 else 0.0
        self._line = line
        rivals = {name: averager(name, self._data.size, world) for name in OVER_TCP if name != "gloo"}
        self.over_tcp: dict[str, Callable[[], None]] = {
            "gloo": self._gloo,
            **{name: partial(average, self._buffer) for name, average in rivals.items()},
        }

    def end(self, average: Callable[[], None], *, calm: bool = False) -> int:
        """One all-reduce, in which nobody is late if it is ``calm``; ns from the common start to the own result."""
        self._buffer.numpy()[:] = self._data
        start = self._line.wait()
        if self._delay and not calm:
            time.sleep(max(0.0, self._delay - (time.monotonic_ns() - start) / 1e9))
        average()
        return time.monotonic_ns() - start

    def tailbound(self, ours: Communicator) -> None:
        """Ours."""
        outcome = ours.allreduce(self._data, self._out).result()
        if outcome.error is not None:
            raise outcome.error

    def _gloo(self) -> None:
        dist.all_reduce(self._buffer)
        self._buffer.mul_(1 / dist.get_world_size())


def work(job: dict[str, Any], channel: Channel) -> None:
    """Everything this rank does."""
    ends: dict[str, list[int]] = {name: [] for name in WAYS}
    rows = {STRICT: [0, 0], BOUNDED: [0, 0]}
    datapath = ""
    with gathered(job) as line:
        rank = _Rank(job["size"], job["delay_ms"], line)
        for turn in range(_TURNS):
            for name in (STRICT, BOUNDED)[:: 1 if turn % 2 == 0 else -1]:
                channel.report("progress", turn=turn, name=name)
                with communicator(job, f"{turn}-{name}", **_SETTINGS[name]) as ours:
                    datapath = ours.datapath
                    ways: dict[str, Callable[[], None]] = {**rank.over_tcp, name: partial(rank.tailbound, ours)}
                    for _ in range(_CALM):
                        rank.end(ways[name], calm=True)
                    for _ in range(warm_ups(name, job["delay_ms"])):
                        rank.end(ways[name])
                    for average in rank.over_tcp.values():
                        rank.end(average)
                    ours.drain()
                    before = totals(ours)
                    for i in range(-(-job["iters"] // _TURNS)):
                        for each in list(ways)[:: 1 if i % 2 == 0 else -1]:
                            ends[each].append(rank.end(ways[each]))
                    line.wait()
                    ours.drain()
                    after = totals(ours)
                    for at, what in enumerate(("expected", "delivered")):
                        rows[name][at] += after[what] - before[what]
    channel.report("times", ends=ends, rows=rows, datapath=datapath)


if __name__ == "__main__":
    sys.exit(serve(work))
