"""``tailbound bench straggler``: time exposed after the arrival of a rank that always comes late.

One rank launches every step a given time after the others. Measured is how long it takes from its launch until the last
rank has every result: what a step still costs once the straggler is there. Compared are Tailbound with agreed owner
maps (``tailbound``: soon the straggler owns nothing), the same with a fixed map (``tar``: plain Transpose AllReduce),
and Gloo's ring. All ranks' gradients count in all three: deadlines are longer than any delay here.

StragglAR (the all-reduce that this gain is taken from) expects 2 (N - 1) / N of a buffer's time to become about 1.
It takes buckets in flight together to see it, as a backward pass has them: contributions to one go out while results
of the one before come in.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tailbound.errors import ConfigError
from tailbound_lab.bench import figures
from tailbound_lab.bench.allreduce import conditions
from tailbound_lab.bench.begin import prepared
from tailbound_lab.bench.channel import Channel, serve
from tailbound_lab.bench.places import datapath_at
from tailbound_lab.bench.save import save
from tailbound_lab.bench.start import StartLine
from tailbound_lab.bench.team import Team
from tailbound_lab.lab.spec import LabSpec

OURS, PLAIN, THEIRS = "tailbound", "tar", "gloo"
DELAYS_MS = (0.0, 25.0, 50.0, 100.0, 200.0)
#: Buckets of a step, launched together.
BUCKETS = 4
#: Steps before those that count: at least, and at most while the straggler still owns rows.
_WARMUP, _WARMUP_MOST = 6, 60
#: Turns that each of ours takes at every delay, in alternating order; the iterations are dealt among them.
_TURNS = 2
_DEADLINE_NS = 1_500_000_000


def run(
    spec: LabSpec,
    *,
    size: int = 25 << 20,
    delays: Sequence[float] = DELAYS_MS,
    iters: int = 20,
    datapath: str = "auto",
    json_file: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Measures, prints a table, writes ``json_file``; returns its rows.

    Args:
        spec: the lab; a rate makes links, not processors, decide.
        size: bytes of float32 of a step.
        delays: of the straggler, the last rank, in ms.
        iters: steps of each kind that count, at every delay.
        datapath: ``auto``, ``xdp`` or ``udp``.
        json_file: where the rows go.
        console: where the table goes.

    Raises:
        ConfigError, CapabilityError: what is asked for cannot be had here.
        TransportError: a worker failed.
    """
    console = console or Console()
    if iters < _TURNS or not delays or min(delays) < 0 or max(delays) > 500 or size < 4096 * spec.workers:
        raise ConfigError(f"give {_TURNS} iterations or more, delays of 0..500 ms, and 4 KiB for every worker")
    size -= size % 4
    rows: list[dict[str, Any]] = []
    with prepared(spec, datapath, console) as (place, why_not, line):
        job = {
            "size": size, "delays": list(delays), "iters": iters, "line": str(line),
            "datapath": datapath_at(place, datapath),
        }  # fmt: skip
        settings = conditions(spec, why_not is None)
        with Team(place, "tailbound_lab.bench.straggler", job, console) as team:
            for delay in delays:
                reports = {rank: message for rank, message in team.gather("delay") if message["kind"] == "delay"}
                rows += summarize(size, delay, [reports[rank] for rank in range(team.ranks)], settings)
                console.print(f"{delay:g} ms: done", highlight=False)
            team.finish()
    console.print(table(rows))
    save(rows, json_file)
    return rows


def summarize(
    size: int, delay: float, ranks: Sequence[dict[str, Any]], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Rows of one delay from what every rank reported: by kind, [launch, end] of every step in ns after its start."""
    rows = []
    for name in (OURS, PLAIN, THEIRS):
        times = [report["times"][name] for report in ranks]
        exposed = [
            (max(end for _, end in step) - step[-1][0]) / 1e6  # the last rank is the straggler
            for step in zip(*times, strict=True)
        ]
        expected = sum(report["rows"][name][0] for report in ranks) if name != THEIRS else 0
        rows.append(
            {
                "name": name,
                "workers": len(ranks),
                "bytes": size,
                "delay_ms": delay,
                "exposed_ms": figures.percentile(exposed, 50),
                "exposed_min_ms": min(exposed),
                "exposed_max_ms": max(exposed),
                "iters": len(exposed),
                "straggler_owns": ranks[0]["owns"].get(name, 0.0),
                "delivered": sum(r["rows"][name][1] for r in ranks) / expected if expected else 1.0,
                **settings,
                "datapath": "tcp" if name == THEIRS else ranks[0]["datapath"],
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line a delay: exposed ms of each kind, and how much less than plain TAR and Gloo."""
    first = rows[0]
    title = f"exposed after the straggler, {first['workers']} workers, {first['bytes']} B, datapath {first['datapath']}"
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for heading in ("delay\nms", "tailbound\nms", "plain TAR\nms", "Gloo\nms", "of TAR\n", "of Gloo\n", "owns\n%"):
        result.add_column(heading, justify="right", no_wrap=True)
    for delay in dict.fromkeys(row["delay_ms"] for row in rows):
        by_name = {row["name"]: row for row in rows if row["delay_ms"] == delay}
        ours, plain, theirs = (by_name[name]["exposed_ms"] for name in (OURS, PLAIN, THEIRS))
        result.add_row(
            f"{delay:g}", f"{ours:.1f}", f"{plain:.1f}", f"{theirs:.1f}", f"{ours / plain:.2f}",
            f"{ours / theirs:.2f}", f"{100 * by_name[OURS]['straggler_owns']:.0f}",
        )  # fmt: skip
    return result


# -- a worker -----------------------------------------------------------------------------------------------------


class _Contest:
    """One rank's data, and one step of each kind at a time."""

    def __init__(self, size: int, rank: int, ranks: int, line: StartLine) -> None:
        import torch

        from tailbound_lab.bench.worker import gradient

        self.rank, self.ranks, self.line = rank, ranks, line
        self._data = gradient(size, rank)
        self._out = np.zeros_like(self._data)
        cuts = np.linspace(0, size // 4, BUCKETS + 1).astype(int)
        self._cuts = [(int(lo), int(hi)) for lo, hi in itertools.pairwise(cuts)]
        self._buffers = [torch.zeros(hi - lo) for lo, hi in self._cuts]

    def step(self, ours: Any | None, delay: float, *, last: bool = False) -> tuple[int, int]:
        """One step, ours or Gloo's (None); ns of the own launch and end after the common start."""
        for buffer, (lo, hi) in zip(self._buffers, self._cuts, strict=True):
            buffer.numpy()[:] = self._data[lo:hi]
        start = self.line.wait(last=last)
        if self.rank == self.ranks - 1 and delay:
            time.sleep(max(0.0, delay / 1e3 - (time.monotonic_ns() - start) / 1e9))
        launched = time.monotonic_ns()
        if ours is None:
            self._gloo()
        else:
            self._tailbound(ours)
        return launched - start, time.monotonic_ns() - start

    def _tailbound(self, ours: Any) -> None:
        from concurrent.futures import Future

        ends: list[Future[Any]] = [Future() for _ in self._cuts]
        for i, (lo, hi) in enumerate(self._cuts):
            ours.launch(i, self._data[lo:hi], self._out[lo:hi], last=i == len(self._cuts) - 1, done=ends[i].set_result)
        for end in ends:
            if (error := end.result().error) is not None:
                raise error

    def _gloo(self) -> None:
        import torch.distributed as dist

        works = [dist.all_reduce(buffer, async_op=True) for buffer in self._buffers]
        for work, buffer in zip(works, self._buffers, strict=True):
            work.wait()
            buffer.mul_(1 / self.ranks)


def _measure(contest: _Contest, ours: Any, delay: float, iters: int) -> dict[str, Any]:
    """Steps of ``ours`` and Gloo's in turn, once the map has settled."""
    from tailbound_lab.bench.worker import totals

    for i in range(_WARMUP_MOST):
        owned = ours.job.sequence.map.owners.count(contest.ranks - 1)
        contest.step(ours, delay, last=i + 1 >= _WARMUP and (not owned or not ours.config.share_rows))
        if contest.line.over:
            break
    contest.step(None, delay)
    before = totals(ours)
    times: dict[str, list[tuple[int, int]]] = {OURS: [], THEIRS: []}
    for i in range(iters):
        for name in (OURS, THEIRS)[:: 1 if i % 2 == 0 else -1]:
            times[name].append(contest.step(ours if name == OURS else None, delay))
    ours.drain()
    owners, after = ours.job.sequence.map.owners, totals(ours)
    rows = [after[name] - before[name] for name in ("expected", "delivered")]
    return {"times": times, "rows": rows, "owns": owners.count(contest.ranks - 1) / len(owners)}


def work(job: dict[str, Any], channel: Channel) -> None:
    """Everything this rank does."""
    import torch.distributed as dist

    from tailbound_lab.bench.join import communicator, gathered

    with gathered(job) as line:
        contest = _Contest(job["size"], dist.get_rank(), dist.get_world_size(), line)
        for at, delay in enumerate(job["delays"]):
            found: dict[str, Any] = {"times": {OURS: [], PLAIN: [], THEIRS: []}, "rows": {}, "owns": {}}
            for turn in range(_TURNS):
                for name in (OURS, PLAIN)[:: 1 if turn % 2 == 0 else -1]:
                    settings = {"deadline_1": _DEADLINE_NS, "deadline_2": _DEADLINE_NS, "share_rows": name == OURS}
                    with communicator(job, f"{at}-{turn}-{name}", **settings) as ours:
                        one = _measure(contest, ours, delay, job["iters"] // _TURNS)
                        found["datapath"] = ours.datapath
                    found["times"][name] += one["times"][OURS]
                    found["times"][THEIRS] += one["times"][THEIRS]
                    rows = zip(found["rows"].get(name, [0, 0]), one["rows"], strict=True)
                    found["rows"][name] = [a + b for a, b in rows]
                    found["owns"][name] = one["owns"]
            channel.report("delay", **found)


if __name__ == "__main__":
    sys.exit(serve(work))
