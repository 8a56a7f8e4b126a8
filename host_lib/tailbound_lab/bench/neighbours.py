"""``tailbound bench neighbours``: incast of many ranks, two jobs on one network, a job beside the kernel's TCP.

In a lab whose links have a rate and finite queues before them. Every case runs twice: with marks and the speed of the
links known, and without, which is how senders behave where no switch marks and no driver tells a speed. Ranks are
forked from this process, so that two cores carry many of them. ``tailbound bench neighbours --simulated`` is the same
in the simulator (``simulate.beside``), where no processor is ever busy.

Three things make a row of an op miss its deadline, and are told apart: a full queue (the lab's own counters), a packet
lost below its sender's finished mark (``lost`` of the ledger), and a sender that was not through when the op ended
(``late``: on two cores most ranks wait for a core).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tailbound_lab.bench import cpu, figures
from tailbound_lab.bench.save import save
from tailbound_lab.bench.table import show
from tailbound_lab.bench.tcp import Flow, check_congestion
from tailbound_lab.bench.team import Team
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.counters import read
from tailbound_lab.lab.spec import LabSpec
from tailbound_lab.lab.topology import Link

CASES = ("incast", "tcp", "jobs")
#: Ops of each job before those that count: scales, deadlines (clock-26), rates. Ranks report after every few of them.
_WARM_UP, _A_FEW = 25, 5
#: Seconds without a report, beside those that a phase lasts, after which the run is given up.
_SILENCE = 180.0
#: Congestion controls of TCP where none is named.
_CONGESTION = ("reno", "cubic")
#: Seconds between the beginning of a flow and what counts.
_RAMP = 2.0
_WORKER = "tailbound_lab.bench.neighbours_worker"
#: Why rows were missing, as the ledger has it (``observe.ledger``), beside ``lost``.
_LATE = ("late", "refused", "absent")
#: What ranks report as numbers that add up.
_ADDED = ("expected", "delivered", "cut", "lost", *_LATE, "repaired", "on_arrival", "cpu_seconds")


@dataclass(frozen=True)
class Wanted:
    """What is run.

    Attributes:
        ranks: of the incast.
        few: of each job that has neighbours.
        size: bytes of float32 of an op.
        rate: of every link, bit/s.
        queue: bytes that wait before it at most.
        apart_ms: ranks pause for up to so long before each op of the incast and of two jobs, each for itself.
        seconds: that count, of each row.
        congestion: congestion controls of TCP, as the kernel names them; none: Reno, and in a lab Cubic, too.
        seed: of pauses and of the lab.
    """

    ranks: int = 64
    few: int = 4
    size: int = 512 << 10
    rate: int = 10**8
    queue: int = 64 << 10
    apart_ms: float = 10.0
    seconds: float = 10.0
    congestion: tuple[str, ...] = ()
    seed: int = 1


def run(
    wanted: Wanted,
    *,
    cases: Sequence[str] = CASES,
    marks: Sequence[bool] = (True, False),
    json_file: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Runs ``cases``, prints a table, writes ``json_file`` after each; returns the rows.

    Args:
        wanted: what is run.
        cases: of ``CASES``.
        marks: with marks and a known speed, without, or both.
        json_file: for the rows.
        console: for the table.

    Raises:
        ConfigError, CapabilityError: what is asked for cannot be had here; finite queues need root.
        TransportError: a rank failed.
    """
    # what ranks call is loaded once, here
    from tailbound.prepare import compile_all

    console = console or Console()
    if "tcp" in cases:
        check_congestion(wanted.congestion)
    console.print("preparing: loading, and compiling what is not compiled yet", highlight=False)
    compile_all()
    rows: list[dict[str, Any]] = []
    runs = {"incast": _incast, "tcp": _tcp, "jobs": _jobs}
    for case in cases:
        for marked in marks:
            alone: float | None = None
            for row in runs[case](wanted, marked, console):
                if row["case"] == "job":
                    alone = alone or row["ops"][0]
                row["job_share"] = row["ops"][0] / alone if alone and row["tcp"] and row["rows"] else None
                rows.append(row)
                save(rows, json_file)
                console.print(f"{row['case']}, {'with' if marked else 'without'} marks: done", highlight=False)
    show(f"{wanted.size / 1024:g} KiB, {conditions(wanted.rate, wanted.queue)}, lab", table(rows), console)
    return rows


def conditions(rate: int, queue: int) -> str:
    """The network, for the head of a table."""
    return f"{rate / 1e6:g} Mbit/s, {queue / 1024:g} KiB before a link"


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is shown of rows of the lab or of the simulator, under short names."""
    shown = {
        "case": "case", "tcp": "TCP's", "marks": "marks", "p50_ms": "p50 ms", "jain": "Jain", "job_share": "job",
        "tcp_share": "TCP", "dropped_percent": "drop%", "rows_missing_percent": "miss%", "rows_lost_percent": "lost%",
        "marked_percent": "CE%", "busy_percent": "busy%",
    }  # fmt: skip
    there = [key for key in shown if any(row.get(key) is not None for row in rows)]
    return [{shown[key]: _short(row.get(key)) for key in there} for row in rows]


def _short(value: Any) -> Any:
    """As many digits as a line of 80 columns has room for."""
    return float(f"{round(value, 3):.3g}") if isinstance(value, float) else value


class _Bench:
    """A lab with jobs in it, and what it does phase by phase.

    Args:
        lab: built.
        team: of all ranks of all jobs.
        wanted: what is run.
        jobs: how many.
        ranks: of each.
        marked: with marks and known speeds.
        folder: of the files in which jobs agree on the end of a phase.
    """

    def __init__(
        self, lab: Cluster, team: Team, wanted: Wanted, jobs: int, ranks: int, marked: bool, folder: Path
    ) -> None:
        self.lab, self._team, self._wanted, self._jobs = lab, team, wanted, jobs
        self._ranks, self._marked, self._folder = ranks, marked, folder
        began = cpu.busy_seconds()
        ready = [message for _, message in team.gather("ready")]
        self._how = {
            "datapath": ready[0]["datapath"],
            "result": ready[0]["result"],
            "start_cpu_ms": 1e3 * sum(message["cpu_seconds"] for message in ready) / len(ready),
        }
        for done in range(0, _WARM_UP, _A_FEW):
            self.phase(ops=min(_A_FEW, _WARM_UP - done))
        self._how["warm_up_busy_seconds"] = cpu.busy_seconds() - began

    def phase(self, *, ops: int = 0, seconds: float = 0.0) -> list[dict[str, Any]]:
        """``ops`` all-reduces of each job, or as many as ``seconds`` take; reports by rank."""
        for job in range(self._jobs):
            (self._folder / f"last-{job}").write_bytes(bytes(8))
        self._team.tell(json.dumps({"ops": ops, "seconds": seconds}))
        reports = dict(self._team.gather("phase"))
        return [reports[rank] for rank in sorted(reports)]

    def row(self, case: str, flow: Flow | None = None, *, idle: bool = False) -> dict[str, Any]:
        """Counts for the time wanted; ``flow``: TCP that there is meanwhile; ``idle``: and nothing else."""

        def go(seconds: float) -> list[dict[str, Any]]:
            if not idle:
                return self.phase(seconds=seconds)
            time.sleep(seconds)
            return []

        if flow is not None:
            go(_RAMP)
        elsewhere = self.lab.lost_frames()
        before, begin = self._counts(flow), time.monotonic()
        reports = go(self._wanted.seconds)
        after, seconds = self._counts(flow), time.monotonic() - begin
        queue, dropped, marked, link, tcp, again, busy = (now - was for now, was in zip(after, before, strict=True))
        took = [1e3 * one for report in reports for one in report["took"]]
        total = {name: sum(report[name] for report in reports) for name in _ADDED}
        every = max(1, total["expected"])
        can = self._wanted.rate / 8 * seconds
        ops = [
            sum(len(report["took"]) for report in reports[job :: self._jobs]) / self._ranks / seconds
            for job in range(self._jobs)
        ]
        return {
            "case": case,
            "tcp": None if flow is None else flow.kind,
            "ranks": self._ranks,
            "marks": self._marked,
            "bytes": self._wanted.size,
            "rate": self._wanted.rate,
            "queue": self._wanted.queue,
            "p50_ms": None if idle else figures.percentile(took, 50),
            "p99_ms": None if idle else figures.percentile(took, 99),
            "ops": ops,
            "ops_done": min((len(report["took"]) for report in reports), default=0),
            "jain": figures.jain(ops) if self._jobs > 1 else None,
            "job_link": None if idle else (link - tcp) / can,
            "tcp_share": tcp / can if flow is not None else None,
            "tcp_rtt_ms": flow.rtt_ms if flow is not None else None,
            "tcp_retransmitted": again if flow is not None else None,
            "packets": queue,
            "dropped": dropped,
            "dropped_elsewhere": self.lab.lost_frames() - elsewhere,
            "dropped_on_arrival": total["on_arrival"],
            "dropped_percent": 100 * dropped / max(1, queue),
            "marked_percent": 100 * marked / max(1, queue),
            "rows": total["expected"],
            "rows_missing_percent": 100 * (total["expected"] - total["delivered"]) / every,
            "rows_lost_percent": 100 * total["lost"] / every,
            "rows_late_percent": 100 * sum(total[name] for name in _LATE) / every,
            "rows_repaired_percent": 100 * total["repaired"] / every,
            "deadline_hits": total["cut"],
            "busy_percent": 100 * busy / seconds,
            "rank_cpu_ms": 1e3 * total["cpu_seconds"] / max(1, len(took)),
            **self._how,
        }

    def _counts(self, flow: Flow | None) -> tuple[float, ...]:
        """Packets that came to queues, dropped, marked; bytes that came to worker 0, TCP's; its repeats; busy time."""
        queues, worker = self.lab.queue_counts(), self.lab.workers[0]
        (link,) = [c.rx_bytes for c in self.lab.run(0, read, worker.namespace) if c.interface == Link.DATA.interface]
        tcp = (flow.delivered, flow.retransmitted) if flow is not None else (0, 0)
        return queues.seen, queues.overflowed, queues.marked, link, *tcp, cpu.busy_seconds()


@contextmanager
def _bench(
    wanted: Wanted, marked: bool, console: Console, ranks: int, *, jobs: int = 1, strangers: int = 0, apart: bool = True
) -> Iterator[_Bench]:
    """``jobs`` of ``ranks`` on the same workers, warm; ``strangers``: workers without ranks."""
    spec = LabSpec(ranks + strangers, rate=wanted.rate, queue=wanted.queue, ecn=marked, seed=wanted.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailbound-bench-")))
        for job in range(jobs):
            (folder / f"last-{job}").write_bytes(bytes(8))
        lab = stack.enter_context(Cluster(spec))
        orders = {
            "ranks": ranks, "jobs": jobs, "size": wanted.size, "seed": wanted.seed, "folder": str(folder),
            "apart_ms": wanted.apart_ms if apart else 0.0, "known": wanted.rate / 8 if marked else 0.0,
            "datapath": "udp" if jobs > 1 else "auto",  # an interface has one XDP program
        }  # fmt: skip
        silence = _SILENCE + wanted.seconds
        team = stack.enter_context(
            Team(lab, _WORKER, orders, console, silence=silence, per_host=jobs, hosts=ranks, forked=True)
        )
        yield _Bench(lab, team, wanted, jobs, ranks, marked, folder)
        team.tell("end")
        team.finish()


def _incast(wanted: Wanted, marked: bool, console: Console) -> Iterator[dict[str, Any]]:
    with _bench(wanted, marked, console, wanted.ranks) as bench:
        yield bench.row("incast")


def _tcp(wanted: Wanted, marked: bool, console: Console) -> Iterator[dict[str, Any]]:
    """A job alone, and beside each kind of TCP, from a worker of its own to that of rank 0."""
    with _bench(wanted, marked, console, wanted.few, strangers=1, apart=False) as bench:
        yield bench.row("job")
        for congestion in wanted.congestion or _CONGESTION:
            for ecn in (True, False) if marked else (False,):
                with Flow(bench.lab, wanted.few, 0, congestion=congestion, ecn=ecn) as flow:
                    yield bench.row("TCP", flow, idle=True)
                    yield bench.row("job, TCP", flow)


def _jobs(wanted: Wanted, marked: bool, console: Console) -> Iterator[dict[str, Any]]:
    with _bench(wanted, marked, console, wanted.few, jobs=2) as bench:
        yield bench.row("two jobs")
