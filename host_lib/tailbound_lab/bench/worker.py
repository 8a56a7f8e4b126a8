"""One rank of ``tailbound bench allreduce``: Tailbound and others in turn, in the same process and the same minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tailbound.collective.communicator import Communicator
from tailbound.transport.pace import Pacer
from tailbound_lab.bench.channel import Channel, serve
from tailbound_lab.bench.figures import nmse
from tailbound_lab.bench.join import joined
from tailbound_lab.bench.link import link_bytes
from tailbound_lab.bench.meter import Meter
from tailbound_lab.bench.rivals.choose import averager
from tailbound_lab.bench.start import StartLine
from tailbound_lab.bench.turns import UNPACED

OURS, THEIRS = "tailbound", "gloo"
#: Of an ``Outcome``: rows expected and delivered, and stages ended by their deadline.
COUNTED = ("expected", "delivered", "deadline_hits")
#: Iterations whose results are compared with the exact mean; spread evenly over all.
_COMPARED = 8
_REPORT_EVERY = 0.2


def gradient(size: int, rank: int) -> NDArray[np.float32]:
    """Gaussian data of ``size`` bytes, the same for the same rank."""
    return np.random.default_rng([size, rank]).standard_normal(size // 4, dtype=np.float32)


def exact_mean(size: int, ranks: int) -> NDArray[np.float64]:
    """Mean of all ranks' ``gradient`` in float64."""
    total = np.zeros(size // 4)
    for rank in range(ranks):
        total += gradient(size, rank)
    total /= ranks
    return total


class _Unpaced(Pacer):
    """Without rates, grants and a word of the link's speed; ``paced``, whose turn comes, hears of what changes."""

    def __init__(self, paced: Pacer) -> None:
        super().__init__(paced.paths)
        self._paced = paced

    def observe(self, rank: int, rtt: int, sent: int, marked: float, now: int, whole: int = 0) -> None:
        """For nobody: it is of the wrong ops."""

    def grant(self, rank: int, share: float) -> None:
        """For ``paced`` alone."""
        self._paced.grant(rank, share)

    def follow(self, speed: float) -> None:
        """For ``paced`` alone."""
        self._paced.follow(speed)

    def among(self, peers: int) -> None:
        """For ``paced`` alone."""
        self._paced.among(peers)


class Contest:
    """One size: the data, and one timed all-reduce of each kind at a time.

    ``rivals``: of ``bench.rivals``, beside Tailbound and Gloo. They and Gloo average in a buffer of torch's. ``rest``:
    seconds before each.
    """

    def __init__(
        self,
        size: int,
        ours: Communicator,
        line: StartLine,
        meter: Meter,
        rivals: Sequence[str] = (),
        rest: float = 0.0,
    ) -> None:
        self.ours, self._line, self.meter, self._rest = ours, line, meter, rest
        self._ranks = ours.config.ranks
        self._data = gradient(size, ours.config.rank)
        self._exact = exact_mean(size, self._ranks)
        self._out = np.zeros_like(self._data)
        self._buffer = torch.zeros(self._data.size)
        self._run: dict[str, Callable[[], None]] = {
            OURS: partial(self._tailbound, OURS), UNPACED: partial(self._tailbound, UNPACED), THEIRS: self._gloo
        }  # fmt: skip
        paced = ours.job.flow.queue.pacer
        self._pacers = {OURS: paced, UNPACED: _Unpaced(paced)}
        world = dist.group.WORLD
        assert world is not None
        for name in rivals:
            self._run[name] = partial(averager(name, self._data.size, world), self._buffer)
        self.times: dict[str, list[float]] = {name: [] for name in self._run}
        self.errors: dict[str, list[float]] = {name: [] for name in self._run}
        #: of ``COUNTED`` by name; the communicator's own counters are of both ways together
        self.counts = {what: dict.fromkeys(self._pacers, 0) for what in COUNTED}

    def forget(self) -> None:
        """Drops the times, errors, counts and processor times so far."""
        for kept in (self.times, self.errors):
            for name in kept:
                kept[name] = []
        self.counts = {what: dict.fromkeys(self._pacers, 0) for what in COUNTED}
        self.meter.forget()

    def alone(self, name: str) -> float:
        """One all-reduce that begins now, wherever the other ranks are; time in seconds to this rank's result."""
        self._buffer.numpy()[:] = self._data
        return self._timed(name)

    def round(self, name: str, *, keep: bool, compare: bool) -> float:
        """One all-reduce; time in seconds from the common start to this rank's result."""
        self._buffer.numpy()[:] = self._data
        if self._rest:
            time.sleep(self._rest)
        if name in self._pacers:
            self._pace(self._pacers[name])
        self._line.wait(meanwhile=lambda: self.meter.turn(name))
        taken = self._timed(name)
        if keep:
            self.times[name].append(taken)
        if compare:
            self.errors[name].append(nmse(self._out if name in self._pacers else self._buffer.numpy(), self._exact))
        return taken

    def settle(self) -> None:
        """Waits for all ranks; what they did until now is charged to the last all-reduce, what follows is not."""
        self._line.wait(meanwhile=self.meter.turn)

    def _timed(self, name: str) -> float:
        with self.meter.op():
            begin = time.perf_counter()
            self._run[name]()
            return time.perf_counter() - begin

    def pace_again(self) -> None:
        """Rates are in force for whoever measures next, whichever came last here."""
        self._pace(self._pacers[OURS])

    def _pace(self, pacer: Pacer) -> None:
        """What the send queue goes by from now on."""
        queue = self.ours.job.flow.queue
        if queue.pacer is pacer:
            return

        def exchange() -> None:
            queue.pacer = pacer

        self.ours._engine.ask(exchange)

    def _tailbound(self, name: str) -> None:
        outcome = self.ours.allreduce(self._data, self._out).result()
        if outcome.error is not None:
            raise outcome.error
        for what, by_name in self.counts.items():
            by_name[name] += getattr(outcome, what)

    def _gloo(self) -> None:
        dist.all_reduce(self._buffer)
        self._buffer.mul_(1 / self._ranks)


def totals(ours: Communicator) -> dict[str, int]:
    """Rows expected and delivered, and stages ended by their deadline, since the start."""
    counters = ours.stats()["counters"]
    hits = counters.get("seal_deadline_hits", 0) + counters.get("result_deadline_hits", 0)
    return {
        "expected": counters.get("rows_expected", 0),
        "delivered": counters.get("rows_delivered", 0),
        "deadline_hits": hits,
    }


def measure(job: dict[str, Any], size: int, contest: Contest, channel: Channel) -> None:
    """Measures one size and reports it."""
    ours = contest.ours
    names = [OURS, *job["vs"]]
    for _ in range(job["warmup"]):
        for name in names:
            contest.round(name, keep=False, compare=False)
    ours.drain()
    contest.forget()
    carried = link_bytes()
    told = time.monotonic()
    every = max(1, job["iters"] // _COMPARED)
    for i in range(job["iters"]):
        for name in names if i % 2 == 0 else reversed(names):
            contest.round(name, keep=True, compare=i % every == 0)
        if ours.config.rank == 0 and time.monotonic() - told > _REPORT_EVERY:
            told = time.monotonic()
            channel.report("progress", size=size, done=i + 1)
    contest.settle()
    contest.pace_again()
    ours.drain()
    carried_now = link_bytes()
    channel.report(
        "size",
        size=size,
        times={name: contest.times[name] for name in names},
        nmse={name: contest.errors[name] for name in names},
        spent=contest.meter.report(),
        **contest.counts,
        link_bytes=None if carried is None or carried_now is None or UNPACED in names else carried_now - carried,
    )


def work(job: dict[str, Any], channel: Channel) -> None:
    """Everything this rank does."""
    with joined(job) as (ours, line):
        meter = Meter(kernel=ours.config.rank == 0)
        channel.report("ready", datapath=ours.datapath)
        for size in job["sizes"]:
            rivals = [name for name in job["vs"] if name not in (THEIRS, UNPACED)]
            measure(job, size, Contest(size, ours, line, meter, rivals, job.get("rest", 0.0)), channel)


if __name__ == "__main__":
    sys.exit(serve(work))
