"""One experiment: workers that prepare once and then do phase after phase as they are told, and the rows made of that.

Gloo has no deadline: under loss a rank may wait for TCP's retransmission timer for minutes. The iterations before
count, the one that did not end counts with the time that was waited for it, and new workers go on.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from tailbound.errors import CapabilityError, ConfigError, TransportError
from tailbound.prepare import Preparation
from tailbound_lab.bench import figures
from tailbound_lab.bench.channel import GLOO, OURS, QUANTISED, STAMPED, order_of
from tailbound_lab.bench.meter import per_op
from tailbound_lab.bench.start import StartLine
from tailbound_lab.bench.team import Team
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import LabSpec

#: All-reduces before those that count: scales, deadlines (clock-26), caches.
WARM_UP = 25
#: Workers of all-reduces, and of trainings.
CONTEST, COURSE = "tailbound_lab.bench.contest", "tailbound_lab.bench.course"
#: Seconds without a report after which workers are given up.
SILENCE = 200.0


@dataclass
class Phase:
    """Results of one phase, or of several.

    Attributes:
        times: by name, by rank, seconds of each iteration; as many for every rank.
        reports: by rank, what was counted (only of phases that ended).
        stuck: names of those whose iteration did not end, with the seconds that were waited.
    """

    times: dict[str, list[list[float]]] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    stuck: list[tuple[str, float]] = field(default_factory=list)

    def add(self, other: Phase) -> None:
        """Add another phase of the same ranks."""
        for name, by_rank in other.times.items():
            mine = self.times.setdefault(name, [[] for _ in by_rank])
            for rank, times in enumerate(by_rank):
                mine[rank] += times
        self.reports += other.reports
        self.stuck += other.stuck

    def slowest(self, name: str, without: int | None = None) -> list[float]:
        """Return iteration times of ``name``: the slowest rank's, ``without`` one of them; stuck ones at the end."""
        chosen = [times for rank, times in enumerate(self.times.get(name, [])) if rank != without]
        return figures.slowest(chosen) + [seconds for stuck, seconds in self.stuck if stuck == name]

    def counted(self, what: str, without: int | None = None) -> float | None:
        """Return the sum of a count over ranks and phases; None where no phase was reported, or a rank cannot say."""
        values = [report["counted"][what] for report in self.reports if report["rank"] != without]
        return None if not values or None in values else sum(values)


class Experiment:
    """The workers of one lab.

    Args:
        lab: where they run, built.
        job: handed to every worker, plain types; ``rest`` of ``Team`` goes there.
        console: for what workers print.
        worker: module of the workers.
        patience: seconds without a report after which an iteration over TCP counts as stuck.
        warm: the phase that new workers do before any other; empty: none.
        rest: of ``Team``.

    Attributes:
        job: what the next workers are handed.
        ready: what each rank reported when it was prepared.
    """

    def __init__(
        self,
        lab: Cluster,
        job: Mapping[str, Any],
        console: Console,
        *,
        worker: str = CONTEST,
        patience: float = SILENCE,
        warm: Mapping[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        self._lab, self._console, self._patience = lab, console, patience
        self._worker, self._warm, self._rest = worker, warm, rest
        self._folder = tempfile.TemporaryDirectory(prefix="tailbound-bench-")
        self.job: dict[str, Any] = {"folder": self._folder.name, "silence": patience} | dict(job)
        self._team: Team | None = None
        self.ready: list[dict[str, Any]] = []

    def __enter__(self) -> Experiment:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._team is not None and kind is None:
                self._team.tell("end")
                self._team.finish()
        finally:
            self.drop()
            self._folder.cleanup()

    @property
    def folder(self) -> Path:
        """Files that workers share."""
        return Path(self._folder.name)

    @property
    def datapath(self) -> str:
        """How ranks receive; prepares the workers if need be."""
        self.prepare()
        return "+".join(sorted({str(one["datapath"]) for one in self.ready}))

    def prepare(self) -> Team:
        """Start the workers if there are none, wait until all are ready, and warm them up."""
        if self._team is not None:
            return self._team
        team = Team(self._lab, self._worker, self.job, self._console, silence=SILENCE, **self._rest)
        StartLine.create(self.folder / "start", team.ranks)
        self._team = team
        team.__enter__()
        found = {rank: message for rank, message in team.gather("ready") if message["kind"] == "ready"}
        self.ready = [found[rank] for rank in range(team.ranks)]
        if self._warm:
            self.phase(**self._warm)
        return team

    def phase(
        self,
        *,
        on: Callable[[int, dict[str, Any]], object] | None = None,
        at_start: Callable[[Team], None] | None = None,
        **what: Any,
    ) -> Phase:
        """Do one phase.

        Args:
            on: called with the rank and each message that is no part of the result.
            at_start: called once all ranks have begun a paced phase.
            what: of the worker's ``phase``.

        Raises:
            TransportError: a worker failed, or said nothing for too long, and not in an all-reduce over TCP.
        """
        team = self.prepare()
        team.tell(json.dumps(what))
        entries: list[list[tuple[str, float]]] = [[] for _ in range(team.ranks)]
        out, reports, begun = Phase(), dict[int, dict[str, Any]](), 0
        try:
            while len(reports) < team.ranks:
                rank, message = team.next(self._patience)
                if message["kind"] == "phase":
                    reports[rank] = message | {"rank": rank}
                elif message["kind"] == "times":
                    entries[rank] += [(name, seconds) for name, seconds in message["times"]]
                elif message["kind"] == "begun":
                    begun += 1
                    if begun == team.ranks and at_start is not None:
                        at_start(team)
                if on is not None:
                    on(rank, message)
        except TransportError as error:
            names, done = what.get("names", [OURS]), min(len(each) for each in entries)
            name = order_of(names, done // len(names))[done % len(names)]
            if name not in (GLOO, QUANTISED):
                raise
            self._console.print(f"an all-reduce of {name} did not end: {error}", highlight=False, soft_wrap=True)
            out.stuck.append((name, self._patience))
            self.drop()
        least = min(len(each) for each in entries)
        for name in what.get("names", []):
            out.times[name] = [[s for n, s in each[:least] if n == name] for each in entries]
        out.reports = [reports[rank] for rank in sorted(reports)]
        return out

    def drop(self) -> None:
        """End the present workers; the next phase has new ones."""
        if self._team is not None:
            self._team.close()
            self._team = None


@contextmanager
def opened(spec: LabSpec, datapath: str, console: Console) -> Iterator[tuple[Cluster, dict[str, Any], str]]:
    """Compile, then build a lab.

    Args:
        spec: of the lab.
        datapath: that is asked for.
        console: for what is done.

    Yields:
        The lab, ``conditions`` for rows, and the datapath that workers are to take.

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

    What Tailbound's ranks count is None where no phase was reported: an all-reduce that did not end takes the counts of
    its phase with it.

    Args:
        phase: of any number of ranks.
        size: bytes of an all-reduce.
        about: the conditions; ``datapath`` is Tailbound's.
        without: a rank that does not count.
    """
    rows: list[dict[str, Any]] = []
    for name in phase.times:
        times = phase.slowest(name, without)
        if not times:
            continue
        ours, ranks = name in (OURS, STAMPED), len(phase.times[name])
        p50, p99 = (figures.percentile(times, percent) for percent in (50, 99))
        expected, delivered = (phase.counted(what, without) for what in ("expected", "delivered"))
        errors = [error for r in phase.reports if r["rank"] != without for error in r["nmse"].get(name, ())]
        deadlines = [r["deadlines_ms"] for r in phase.reports if r["rank"] != without] if ours else []
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
            "stuck": sum(stuck == name for stuck, _ in phase.stuck),
            "algbw_gbps": figures.algbw(size, p50),
            "busbw_gbps": figures.busbw(size, p50, ranks),
            "delivered": 1.0 if not ours else (delivered or 0) / expected if expected else None,
            "deadline_hits": phase.counted("deadline_hits", without) if ours else 0,
            "deadline_1_ms": max((one for one, _ in deadlines), default=None),
            "deadline_2_ms": max((two for _, two in deadlines), default=None),
            "link_bytes_per_op": None if link is None else link / ranks / len(times),
            "nmse": sum(errors) / len(errors) if errors else None,
            **per_op((entry for report in phase.reports for entry in report["spent"]), name),
            **about,
            "datapath": about["datapath"] if ours else "tcp",
        }
        if name == STAMPED:
            ops = [op for report in phase.reports for op in report["stamps"]]
            row |= {f"{part}_ms": median(op[part] for op in ops) for part in ops[0]}
        if rows:
            row["ratio_p50"] = row["p50_ms"] / rows[0]["p50_ms"]
        rows.append(row)
    return rows
