"""One rank of ``tailbound bench allreduce --per-host``: ranks of a host that share buckets, and a flat job, in turn.

A step is as DDP makes it: several buckets, all of them handed over before the first one is waited for.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tailbound.errors import ConfigError, TransportError
from tailbound.torch.node import find
from tailbound.torch.node_state import NodeState
from tailbound.torch.state import TailboundState
from tailbound_lab.bench.channel import Channel, serve
from tailbound_lab.bench.figures import nmse
from tailbound_lab.bench.join import gathered
from tailbound_lab.bench.link import link_bytes
from tailbound_lab.bench.meter import Meter
from tailbound_lab.bench.start import StartLine
from tailbound_lab.bench.worker import exact_mean, gradient, totals

NODES, FLAT = "tailbound", "flat"
#: Buckets of a step.
_BUCKETS = 4


class Contest:
    """One size: the data, and one timed step of each kind at a time."""

    def __init__(self, size: int, states: dict[str, TailboundState], line: StartLine, meter: Meter) -> None:
        self.states, self._line, self.meter = states, line, meter
        self._parts = torch.from_numpy(gradient(size, dist.get_rank())).chunk(_BUCKETS)
        self._exact = exact_mean(size, dist.get_world_size())
        self._at: tuple[str | None, int] = (None, 0)
        self.forget()

    def forget(self) -> None:
        """Drops everything measured so far."""
        self.times: dict[str, list[float]] = {name: [] for name in self.states}
        self.errors: dict[str, list[float]] = {name: [] for name in self.states}
        self.carried = dict.fromkeys(self.states, 0)
        self.meter.forget()

    def turn(self, name: str | None = None) -> None:
        """All ranks are through with what they did; what follows is of ``name``."""
        before, bytes_before = self._at
        self._at = name, link_bytes() or 0
        if before is not None:
            self.carried[before] += self._at[1] - bytes_before
        self.meter.turn(name)

    def round(self, name: str, *, compare: bool) -> None:
        """One step, timed from the common start to this rank's last average."""
        self._line.wait(meanwhile=partial(self.turn, name))
        with self.meter.op():
            begin = time.perf_counter()
            state, last = self.states[name], len(self._parts) - 1
            averages = [state.average(index, part, index == last) for index, part in enumerate(self._parts)]
            whole = [average.wait() for average in averages]
            self.times[name].append(time.perf_counter() - begin)
        if compare:
            self.errors[name].append(nmse(torch.cat(whole).numpy(), self._exact))

    def settle(self) -> None:
        """Waits for all ranks."""
        self._line.wait(meanwhile=self.turn)


def measure(job: dict[str, Any], size: int, contest: Contest, channel: Channel) -> None:
    """Measures one size and reports it."""
    names = list(contest.states)
    for _ in range(job["warmup"]):
        for name in names:
            contest.round(name, compare=False)
    contest.settle()
    contest.forget()
    before = {name: _totals(state) for name, state in contest.states.items()}
    for i in range(job["iters"]):
        for name in names if i % 2 == 0 else reversed(names):
            contest.round(name, compare=i in (0, job["iters"] - 1))
    contest.settle()
    after = {name: _totals(state) for name, state in contest.states.items()}
    counted = {what: {name: after[name][what] - before[name][what] for name in names} for what in after[NODES]}
    channel.report(
        "size", size=size, times=contest.times, nmse=contest.errors, spent=contest.meter.report(), **counted,
        link_bytes=contest.carried if link_bytes() is not None else None,
    )  # fmt: skip


def _totals(state: TailboundState) -> dict[str, int]:
    assert state.communicator is not None
    if not state.communicator.drain():
        raise TransportError("ops are still unfinished after the last step: report it")
    return totals(state.communicator)


def work(job: dict[str, Any], channel: Channel) -> None:
    """Everything this rank does."""
    with gathered(job) as line:
        world = dist.group.WORLD
        assert world is not None
        node = find(world, "auto", 120.0)
        if node is None or len(node.peers) < 2:
            raise ConfigError("--per-host compares several hosts of several ranks: give 2 workers and 2 ranks at least")
        with (
            NodeState(world, node, device=torch.device("cpu"), timeout=120.0, datapath="udp") as nodes,
            TailboundState(world, datapath="udp") as flat,
        ):
            meter = Meter(kernel=dist.get_rank() == 0)
            channel.report("ready", datapath="udp")
            for size in job["sizes"]:
                measure(job, size, Contest(size, {NODES: nodes, FLAT: flat}, line, meter), channel)
            line.wait()


if __name__ == "__main__":
    sys.exit(serve(work))
