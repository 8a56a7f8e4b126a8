"""One rank of ``tailbound bench profile``: all-reduces with stamps and without, in turn."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np

from tailbound.collective.communicator import Communicator
from tailbound.datapath.xdp import XdpDatapath
from tailbound.kernel import interfaces, syscalls
from tailbound_lab.bench.channel import Channel, serve
from tailbound_lab.bench.join import communicator, gathered
from tailbound_lab.bench.start import StartLine
from tailbound_lab.bench.stopwatch import Stopwatch
from tailbound_lab.bench.worker import gradient


class Profile:
    """One size."""

    def __init__(self, size: int, ours: Communicator, line: StartLine, watch: Stopwatch, program: int | None) -> None:
        self._ours, self._line, self._watch, self._program = ours, line, watch, program
        self._data = gradient(size, ours.config.rank)
        self._out = np.zeros_like(self._data)

    def op(self, *, stamped: bool) -> dict[str, int | None]:
        """One all-reduce; what it took of each clock, in ns."""
        watch = self._watch
        with watch.installed() if stamped else nullcontext():
            self._line.wait()
            waited, run = watch.waited(), self._run_ns()
            begin = watch.read()
            outcome = self._ours.allreduce(self._data, self._out).result()
            end = watch.read()
            waited, run_now = watch.waited() - waited, self._run_ns()
        if outcome.error is not None:
            raise outcome.error
        thread, own = end.thread - begin.thread, end.own - begin.own
        return {
            "wall": end.end - begin.begin,
            "thread": thread,
            "codec": end.codec - begin.codec,
            "calls": end.calls - begin.calls,
            "own": own,
            "others": max(0, end.process - begin.process - thread - own),
            "waited": waited,
            "program": None if run is None or run_now is None else run_now - run,
        }

    def _run_ns(self) -> int | None:
        return None if self._program is None else syscalls.prog_info(self._program).run_ns


def _program_of(ours: Communicator) -> int:
    """Descriptor of the XDP program on this rank's interface."""
    datapath = ours.job.datapath
    assert isinstance(datapath, XdpDatapath)
    there = interfaces.xdp_below(datapath.interface)
    assert there is not None
    return syscalls.prog_by_id(there.prog_id)


def work(job: dict[str, Any], channel: Channel) -> None:
    """Everything this rank does."""
    watch = Stopwatch()
    with gathered(job) as line, communicator(job, "tailbound", watch.here) as ours:
        channel.report("ready", datapath=ours.datapath)
        program = _program_of(ours) if job["counted"] and ours.datapath == "xdp" else None
        for size in job["sizes"]:
            profile = Profile(size, ours, line, watch, program)
            for _ in range(job["warmup"]):
                profile.op(stamped=True)
            watch.functions.clear()
            found: dict[bool, list[dict[str, int | None]]] = {True: [], False: []}
            for i in range(job["iters"]):
                for stamped in (i % 2 == 0, i % 2 != 0):
                    found[stamped].append(profile.op(stamped=stamped))
            line.wait()
            channel.report(
                "size",
                size=size,
                ops=found[True],
                plain=[op["wall"] for op in found[False]],
                functions=dict(watch.functions),
            )
        if program is not None:
            os.close(program)


if __name__ == "__main__":
    sys.exit(serve(work))
