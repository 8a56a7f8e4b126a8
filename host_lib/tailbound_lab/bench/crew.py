"""Worker processes that do phase after phase, and are replaced when an all-reduce of theirs does not end.

Gloo has no deadline: under loss a rank may wait for TCP's retransmission timer for minutes. What has been measured
until then counts, the iteration that did not end counts with the time that was waited for it, and new workers go on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from tailbound.errors import TransportError
from tailbound_lab.bench import figures
from tailbound_lab.bench.start import StartLine
from tailbound_lab.bench.tail_worker import order_of
from tailbound_lab.bench.team import Team
from tailbound_lab.bench.worker import OURS, THEIRS
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.timeline import Timeline

_MODULE = "tailbound_lab.bench.tail_worker"
_FOR_EVER = 1 << 30


@dataclass
class Phase:
    """What came out of one phase, or of several.

    Attributes:
        times: by name, by rank, seconds of each iteration; as many for every rank.
        reports: by rank, what was counted (only of phases that ended).
        stuck: names of those whose iteration did not end, with the seconds that were waited.
    """

    times: dict[str, list[list[float]]] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    stuck: list[tuple[str, float]] = field(default_factory=list)

    def add(self, other: Phase) -> None:
        """Takes in another phase of the same ranks."""
        for name, by_rank in other.times.items():
            mine = self.times.setdefault(name, [[] for _ in by_rank])
            for rank, times in enumerate(by_rank):
                mine[rank] += times
        self.reports += other.reports
        self.stuck += other.stuck

    def slowest(self, name: str, without: int | None = None) -> list[float]:
        """Iteration times of ``name``: the slowest rank's, ``without`` one of them; stuck ones at the end."""
        chosen = [times for rank, times in enumerate(self.times.get(name, [])) if rank != without]
        return figures.slowest(chosen) + [seconds for stuck, seconds in self.stuck if stuck == name]


class Crew:
    """The workers of one lab.

    Args:
        lab: built.
        size: bytes of float32.
        datapath: ``auto``, ``xdp`` or ``udp``.
        folder: for shared files.
        console: what workers print comes out here.
        patience: seconds without a report after which an iteration counts as stuck.
    """

    def __init__(
        self, lab: Cluster, size: int, datapath: str, folder: Path, console: Console, *, patience: float = 20.0
    ) -> None:
        self._lab, self._console, self._patience = lab, console, patience
        self._line = folder / "start"
        self._job = {"size": size, "line": str(self._line), "datapath": datapath}
        self._team: Team | None = None
        self.datapath = ""

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._team is not None:
            try:
                if kind is None:
                    self._team.tell("end")
                    self._team.finish()
            finally:
                self._team.close()

    def phase(
        self,
        names: Sequence[str],
        *,
        seconds: float = float("inf"),
        rounds: int = _FOR_EVER,
        period: float = 0.0,
        stop: tuple[int, float, float] | None = None,
        compare: bool = False,
    ) -> Phase:
        """One phase; ends after ``rounds`` rounds or ``seconds``, whichever is first.

        Args:
            names: who takes turns.
            seconds, rounds: how long.
            period: above 0: a round begins every so many seconds, whoever is there.
            stop: (rank, at, seconds): SIGSTOP a rank in the middle of a paced phase.
            compare: compare some results with the exact mean.

        Raises:
            TransportError: a worker failed, and not in an all-reduce of Gloo.
        """
        team = self._ready()
        what = {
            "names": list(names), "rounds": rounds, "seconds": min(seconds, 1e6), "period": period, "compare": compare,
        }  # fmt: skip
        team.tell(json.dumps(what))
        entries: list[list[tuple[str, float]]] = [[] for _ in range(team.ranks)]
        out = Phase()
        reports: dict[int, dict[str, Any]] = {}
        begun: set[int] = set()
        timeline: AbstractContextManager[Any] = nullcontext()
        try:
            while len(reports) < team.ranks:
                rank, message = team.next(self._patience)
                if message["kind"] == "times":
                    entries[rank] += [(name, seconds) for name, seconds in message["times"]]
                elif message["kind"] == "phase":
                    reports[rank] = message
                elif message["kind"] == "begun":
                    begun.add(rank)
                    if stop is not None and len(begun) == team.ranks:
                        victim, at, length = stop
                        timeline = Timeline().stop(at, team.processes[victim], seconds=length)
                        timeline.__enter__()
        except TransportError as error:
            done = min(len(each) for each in entries)
            name = order_of(list(names), done // len(names))[done % len(names)]
            if name != THEIRS:
                raise
            self._console.print(f"an all-reduce of {THEIRS} did not end: {error}", highlight=False, soft_wrap=True)
            out.stuck.append((name, self._patience))
            self.drop()
        finally:
            timeline.__exit__(None, None, None)
        least = min(len(each) for each in entries)
        for name in names:
            out.times[name] = [[s for n, s in each[:least] if n == name] for each in entries]
        out.reports = [reports[rank] | {"rank": rank} for rank in sorted(reports)]
        return out

    def drop(self) -> None:
        """Ends the present workers; the next phase has new ones."""
        if self._team is not None:
            self._team.close()
            self._team = None

    def _ready(self) -> Team:
        """The workers, started and warm."""
        if self._team is not None:
            return self._team
        StartLine.create(self._line, self._lab.spec.workers)
        self._team = Team(self._lab, _MODULE, self._job, self._console)
        self._team.__enter__()
        for _, message in self._team.gather("ready"):
            self.datapath = message.get("datapath", self.datapath)
        self.phase([OURS], rounds=_WARM_UP)
        return self._ready()


#: All-reduces before those that count: scales, deadlines (clock-26), caches.
_WARM_UP = 25
