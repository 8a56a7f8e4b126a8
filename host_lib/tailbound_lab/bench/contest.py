"""One rank of an experiment with all-reduces: Tailbound and others in turn, in the same process and the same minute.

A phase is a number of rounds. In *meeting* rounds all ranks begin each all-reduce at one moment (``start``). *Paced*
ones begin by the clock, every ``period`` seconds, whether the others are there or not, as steps do that computing
paces.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tailbound.collective.communicator import Communicator
from tailbound.settings.table import BITS, OPTIONS, PORT, RESULT
from tailbound.transport.config import Config
from tailbound_lab.bench.channel import GLOO, OURS, QUANTISED, Channel, order_of, serve
from tailbound_lab.bench.figures import nmse
from tailbound_lab.bench.link import link_bytes
from tailbound_lab.bench.meter import Meter
from tailbound_lab.bench.quantised import Quantised
from tailbound_lab.bench.start import StartLine


def gradient(size: int, seed: int) -> NDArray[np.float32]:
    """Return Gaussian data of ``size`` bytes, the same for the same seed."""
    return np.random.default_rng([size, seed]).standard_normal(size // 4, dtype=np.float32)


def totals(ours: Communicator) -> dict[str, int]:
    """Return rows expected and delivered, and stages ended by their deadline, since the start."""
    counters = ours.stats()["counters"]
    hits = counters.get("seal_deadline_hits", 0) + counters.get("result_deadline_hits", 0)
    rows = {name: counters.get(f"rows_{name}", 0) for name in ("expected", "delivered")}
    return rows | {"deadline_hits": hits}


class Contest:
    """One rank of one job.

    Args:
        job: of ``Experiment``: ``names`` (who averages) and ``datapath``.
    """

    def __init__(self, job: dict[str, Any], channel: Channel, ours: Communicator, line: StartLine) -> None:
        self._job, self._channel, self._ours, self._line = job, channel, ours, line
        self._size = 0
        self.rank, self.ranks = ours.config.rank, ours.config.ranks
        self._meter = Meter(kernel=self.rank == 0)
        self._run: dict[str, Callable[[], None]] = {}
        self._times: dict[str, list[float]] = {}
        self._errors: dict[str, list[float]] = {}

    def phase(
        self,
        *,
        size: int,
        names: list[str] | None = None,
        rounds: int = 1 << 30,
        seconds: float = 1e6,
        period: float = 0.0,
        late: float = 0.0,
        compare: int = 0,
    ) -> dict[str, Any]:
        """Do one phase, which ends after ``rounds`` or ``seconds``, whichever is first.

        Args:
            size: bytes of an all-reduce.
            names: who takes turns; one alone in a paced phase.
            rounds, seconds: how long.
            period: seconds between two beginnings of a paced phase.
            late: seconds by which the last rank is late in meeting rounds.
            compare: compare every so many results with the exact mean; 0: none.
        """
        names = names or [OURS]
        self._prepare(size)
        ours = self._ours
        ours.drain()
        self._meter.forget()
        self._times, self._errors = {name: [] for name in names}, {name: [] for name in names}
        before, carried = totals(ours), link_bytes()
        if period:
            self._paced(names[0], rounds, period)
        else:
            self._meeting(names, rounds, seconds, late, compare)
        ours.drain()
        self._meter.turn()
        link, counts = link_bytes(), totals(ours)
        counted: dict[str, float | None] = {name: counts[name] - before[name] for name in before}
        counted["link_bytes"] = None if link is None or carried is None else link - carried
        return {
            "times": self._times,
            "counted": counted,
            "nmse": self._errors,
            "spent": self._meter.report(),
        }

    def _meeting(self, names: list[str], rounds: int, seconds: float, late: float, compare: int) -> None:
        end, number = time.monotonic() + seconds, 0
        while True:
            self._line.wait(last=number >= rounds or time.monotonic() > end, meanwhile=self._meter.turn)
            if self._line.over:
                return
            for name in order_of(names, number):
                self._buffer[:] = self._data
                self._line.wait(meanwhile=partial(self._meter.turn, name))
                taken = self._timed(name, late if self.rank == self.ranks - 1 else 0.0)
                if compare and number % compare == 0:
                    self._errors[name].append(self._error(self._buffer if name in (GLOO, QUANTISED) else self._out))
                self._times[name].append(taken)
            number += 1

    def _paced(self, name: str, rounds: int, period: float) -> None:
        begin = self._line.wait(meanwhile=lambda: self._meter.turn(name)) / 1e9
        self._channel.report("begun")
        for number in range(rounds):
            time.sleep(max(0.0, begin + number * period - time.monotonic()))
            self._buffer[:] = self._data
            self._times[name].append(self._timed(name))

    def _timed(self, name: str, late: float = 0.0) -> float:
        """Do one all-reduce ``late`` seconds from now; return seconds from now to this rank's result."""
        begin = time.perf_counter()
        if late:
            time.sleep(late)
        with self._meter.op():
            self._run[name]()
        return time.perf_counter() - begin

    def _tailbound(self) -> None:
        outcome = self._ours.allreduce(self._data, self._out).result()
        if outcome.error is not None:
            raise outcome.error

    def _prepare(self, size: int) -> None:
        """Make data and buffers of ``size`` bytes, and whoever averages them."""
        if size == self._size:
            return
        self._size = size
        self._data = gradient(size, self.rank)
        self._out, self._buffer = np.zeros_like(self._data), np.zeros_like(self._data)
        self._exact: NDArray[np.float64] | None = None
        tensor, world = torch.from_numpy(self._buffer), dist.group.WORLD
        assert world is not None

        def gloo() -> None:
            dist.all_reduce(tensor)
            tensor.mul_(1 / self.ranks)

        self._run = {OURS: self._tailbound, GLOO: gloo}
        if QUANTISED in self._job["names"]:
            self._run[QUANTISED] = partial(Quantised(tensor.numel(), world).mean, tensor)

    def _error(self, mean: NDArray[np.float32]) -> float:
        """Return the error of a mean against the exact one."""
        if self._exact is None:
            self._exact = np.zeros(len(mean))
            for rank in range(self.ranks):
                self._exact += gradient(self._size, rank)
            self._exact /= self.ranks
        return nmse(mean, self._exact)


@contextmanager
def group() -> Iterator[Any]:
    """Make Gloo's process group of all ranks; yield its store."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    yield dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()


def work(job: dict[str, Any], channel: Channel) -> None:
    """Do all of this rank."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    switched = job["datapath"] == "switch"
    config = Config(
        rank=rank, ranks=ranks, port=PORT.read(), result=RESULT.read(), bits=BITS.read(),
        switch=OPTIONS["switch"].read() if switched else None,
    )  # fmt: skip
    line = StartLine(Path(job["folder"], "start"), rank, ranks)
    with group() as store, Communicator(store, config, datapath="auto" if switched else job["datapath"]) as ours:
        channel.report("ready", datapath=ours.datapath)
        channel.obey(Contest(job, channel, ours, line).phase)
        ours.meet("measured")


if __name__ == "__main__":
    sys.exit(serve(work))
