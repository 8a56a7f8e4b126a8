"""One experiment: workers that prepare once and then do phases as they are told, and the rows made of that."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rich.console import Console

from tailbound.errors import CapabilityError, ConfigError, TransportError
from tailbound.prepare import Preparation
from tailbound_lab.bench import figures
from tailbound_lab.bench.channel import END, END_FD, OURS
from tailbound_lab.bench.meter import per_op
from tailbound_lab.bench.start import StartLine
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.ranks import Ranks
from tailbound_lab.lab.spec import LabSpec

#: All-reduces before those that count: scales, deadlines (clock-26), caches.
WARM_UP = 25
#: Workers of all-reduces, and of trainings.
CONTEST, COURSE = "tailbound_lab.bench.contest", "tailbound_lab.bench.course"
_POLL_SECONDS = 0.05
#: After the first sign of failure: time for the rank that failed first to say so itself.
_CONFESS_SECONDS = 0.5
_GOODBYE_SECONDS = 10.0


@dataclass
class Phase:
    """Results of one phase, or of several.

    Attributes:
        times: by name, by rank, seconds of each iteration; as many for every rank.
        reports: by rank, what was counted.
    """

    times: dict[str, list[list[float]]] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Phase) -> None:
        """Add another phase of the same ranks."""
        for name, by_rank in other.times.items():
            mine = self.times.setdefault(name, [[] for _ in by_rank])
            for rank, times in enumerate(by_rank):
                mine[rank] += times
        self.reports += other.reports

    def slowest(self, name: str, without: int | None = None) -> list[float]:
        """Return iteration times of ``name``: the slowest rank's, ``without`` one of them."""
        return figures.slowest([times for rank, times in enumerate(self.times.get(name, [])) if rank != without])

    def counted(self, what: str, without: int | None = None) -> float | None:
        """Return the sum of a count over ranks and phases; None where a rank cannot say."""
        values = [report["counted"][what] for report in self.reports if report["rank"] != without]
        return None if None in values else sum(values)


class Experiment:
    """Workers of one lab, a process a rank, ready when the ``with`` block begins and killed at its end.

    Args:
        lab: where they run, built.
        job: handed to every worker, plain types.
        console: what the workers print comes out here, with the rank in front.
        worker: their module, whose main calls ``channel.serve``.
        env: variables on top of the lab's own.

    Attributes:
        folder: files that workers share.
        ready: what each rank reported when it was prepared.

    Raises:
        TransportError: a worker failed; also of every phase.
    """

    def __init__(
        self, lab: Cluster, job: Mapping[str, Any], console: Console, *, worker: str = CONTEST,
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._lab, self._worker, self._env = lab, worker, dict(env or {})
        self._folder = tempfile.TemporaryDirectory(prefix="tailbound-bench-")
        self.folder = Path(self._folder.name)
        self._job = {"folder": self._folder.name} | dict(job)
        self._ranks = Ranks(lab, console, console)
        self._ends: dict[Connection, int] = {}
        self._messages: deque[tuple[int, dict[str, Any]]] = deque()
        self._errors: list[tuple[int, int, str]] = []
        self.ready: list[dict[str, Any]] = []

    def __enter__(self) -> Experiment:
        try:
            StartLine.create(self.folder / "start", self._lab.spec.workers)
            for rank in range(self._lab.spec.workers):
                self._start(rank)
            self.ready = self._gather("ready")
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._tell(END)
                self._pump(_GOODBYE_SECONDS, lambda: all(one.poll() is not None for one in self._ranks.processes))
                self._check(ended_is_wrong=False)
        finally:
            self._close()

    @property
    def datapath(self) -> str:
        """How ranks receive."""
        return "+".join(sorted({str(one["datapath"]) for one in self.ready}))

    def phase(
        self,
        *,
        on: Callable[[int, dict[str, Any]], object] | None = None,
        at_start: Callable[[Ranks], None] | None = None,
        **what: Any,
    ) -> Phase:
        """Do one phase.

        Args:
            on: called with the rank and each message that is no part of the result.
            at_start: called once all ranks have begun a paced phase.
            what: of the worker's ``phase``.
        """
        self._tell(what)
        begun: set[int] = set()

        def note(rank: int, message: dict[str, Any]) -> None:
            if message["kind"] == "begun" and at_start is not None:
                begun.add(rank)
                if len(begun) == len(self._ranks.processes):
                    at_start(self._ranks)
            if on is not None:
                on(rank, message)

        reports = self._gather("phase", note)
        return Phase({name: [one["times"][name] for one in reports] for name in what.get("names", [])}, reports)

    def _start(self, rank: int) -> None:
        here, there = socket.socketpair()
        self._ends[Connection(here.detach())] = rank
        argv = [sys.executable, "-m", self._worker, json.dumps(self._job)]
        with there:
            self._ranks.start(argv, {**self._env, END_FD: str(there.fileno())}, pass_fds=(there.fileno(),))

    def _tell(self, order: Any) -> None:
        """Gives an order to every rank."""
        for end in self._ends:
            with contextlib.suppress(OSError):  # that it has ended is found out and told by ``_check``
                end.send(order)

    def _gather(
        self, kind: str, on: Callable[[int, dict[str, Any]], object] = lambda rank, message: None
    ) -> list[dict[str, Any]]:
        """The message of one kind that each rank sends; ``on`` gets all others."""
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(self._ranks.processes):
            while not self._messages:
                self._pump(_POLL_SECONDS, lambda: bool(self._messages))
                self._check(ended_is_wrong=True)
            rank, message = self._messages.popleft()
            if message["kind"] == kind:
                found[rank] = message | {"rank": rank}
            else:
                on(rank, message)
        return [found[rank] for rank in sorted(found)]

    def _pump(self, seconds: float, over: Callable[[], bool] = lambda: False) -> None:
        """Takes in what workers say and print."""
        end = time.monotonic() + seconds
        while not over() and time.monotonic() < end:
            for one in wait(list(self._ends), _POLL_SECONDS) if self._ends else ():
                self._take(one)
            self._ranks.streams.pump(0 if self._ends else _POLL_SECONDS)

    def _take(self, end: Any) -> None:
        rank = self._ends[end]
        try:
            message = end.recv()
        except (EOFError, OSError):
            end.close()
            del self._ends[end]
            return
        if message["kind"] == "error":
            self._errors.append((message["at"], rank, message["text"]))
        else:
            self._messages.append((rank, message))

    def _check(self, *, ended_is_wrong: bool) -> None:
        """Raises for the rank that failed first; the others' errors are mostly its echo."""
        ended = {rank: code for rank, one in enumerate(self._ranks.processes) if (code := one.poll()) is not None}
        bad = {rank: code for rank, code in ended.items() if code != 0 or ended_is_wrong}
        if not self._errors and (self._messages or not bad):
            return
        self._pump(_CONFESS_SECONDS)
        if self._errors:
            _, rank, text = min(self._errors)
            raise TransportError(f"rank {rank} failed: {text}; see its output above")
        if self._messages:
            return  # its last words were on their way
        rank, code = min(bad.items())
        how = f"was killed by signal {-code}" if code < 0 else f"ended too early with status {code}"
        raise TransportError(f"rank {rank} {how}; see its output above")

    def _close(self) -> None:
        self._ranks.close()
        for end in self._ends:
            end.close()
        self._folder.cleanup()


@contextmanager
def opened(spec: LabSpec, datapath: str, console: Console) -> Iterator[tuple[Cluster, dict[str, Any], str]]:
    """Compile, then build a lab; yields it, ``conditions`` for rows, and the datapath that workers are to take.

    Raises:
        ConfigError: a straggler that computes longer in each step, which all-reduces alone do not have; one worker.
        CapabilityError: no lab, or no ``xdp``, can be had here.
    """
    if spec.straggler is not None and spec.straggler.every_ms is None:
        rank, ms = spec.straggler.rank, spec.straggler.ms
        raise ConfigError(
            f"a straggler of {spec.straggler} computes longer in each step, and all-reduces alone have none: give "
            f"RANK:MS:EVERY, such as {rank}:{ms:g}:{4 * ms:g}"
        )
    console.print("preparing: compiling what is not compiled yet", highlight=False)
    with Preparation() as preparation:
        preparation.wait()
    if spec.workers < 2:
        raise ConfigError(f"an all-reduce needs at least 2 workers, not {spec.workers}")
    with Cluster(spec) as lab:
        yield lab, conditions(spec), datapath_at(lab, datapath)


def datapath_at(lab: Cluster, asked: str) -> str:
    """Return what ranks in ``lab`` are to receive over: what was asked for, or ``udp`` where there is no XDP.

    Raises:
        CapabilityError: ``xdp`` was asked for, and is not to be had there.
    """
    if lab.xdp:
        return asked
    if asked == "xdp":
        raise CapabilityError("the xdp datapath loads XDP programs, which needs root: run it with sudo")
    return "udp"


def conditions(spec: LabSpec) -> dict[str, Any]:
    """Return what rows say of the network that they were measured on."""
    return {
        "wire": spec.wire_size,
        "rate": spec.rate,
        "loss": spec.loss,
        "burst_loss": None if spec.burst is None else {"loss": spec.burst.loss, "length": spec.burst.length},
        "straggler": None if spec.straggler is None else str(spec.straggler),
    }


def rows_of(phase: Phase, size: int, about: Mapping[str, Any], without: int | None = None) -> list[dict[str, Any]]:
    """Return a row for each of those who took turns in a phase, Tailbound's first.

    Args:
        size: bytes of an all-reduce.
        about: the conditions; ``datapath`` is Tailbound's.
        without: a rank that does not count.
    """
    rows: list[dict[str, Any]] = []
    for name in phase.times:
        times = phase.slowest(name, without)
        if not times:
            continue
        ours, ranks = name == OURS, len(phase.times[name])
        p50, p99 = (figures.percentile(times, percent) for percent in (50, 99))
        expected, delivered = (phase.counted(what, without) for what in ("expected", "delivered"))
        errors = [error for r in phase.reports if r["rank"] != without for error in r["nmse"].get(name, ())]
        link = phase.counted("link_bytes") if ours else None
        row = {
            "name": name,
            "workers": ranks,
            "bytes": size,
            "iters": len(times),
            "p50_ms": p50 * 1e3,
            "p99_ms": p99 * 1e3,
            "mean_ms": sum(times) / len(times) * 1e3,
            "max_ms": max(times) * 1e3,
            "min_ms": min(times) * 1e3,
            "tail": p99 / p50,
            "delivered": 1.0 if not ours else (delivered or 0) / expected if expected else None,
            "deadline_hits": phase.counted("deadline_hits", without) if ours else 0,
            "link_bytes_per_op": None if link is None else link / ranks / len(times),
            "nmse": sum(errors) / len(errors) if errors else None,
            **per_op((entry for report in phase.reports for entry in report["spent"]), name),
            **about,
            "datapath": about["datapath"] if ours else "tcp",
        }
        if rows:
            row["ratio_p50"] = row["p50_ms"] / rows[0]["p50_ms"]
        rows.append(row)
    return rows
