"""``tailbound bench neighbours``: incast of many ranks, two jobs on one network, a job beside the kernel's TCP.

In a lab whose links have a rate and finite queues before them. Every case runs twice: with marks and the speed of the
links known, and without, which is how senders behave where no switch marks and no driver tells a speed. Ranks are
forked from this process, so that two cores carry many of them.

Three things make a row of an op miss its deadline, and are told apart: a full queue (the lab's own counters), a packet
lost below its sender's finished mark (``lost`` of the ledger), and a sender that was not through when the op ended
(``late``: on two cores most ranks wait for a core).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tailbound_lab.bench import cpu, figures
from tailbound_lab.bench.channel import OURS
from tailbound_lab.bench.experiment import WARM_UP, Experiment, Phase, opened
from tailbound_lab.bench.table import Columns, save, show
from tailbound_lab.bench.tcp import Flow, check_congestion
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.counters import read
from tailbound_lab.lab.spec import LabSpec
from tailbound_lab.lab.topology import Link

CASES = ("incast", "tcp", "jobs")
COLUMNS: Columns = {
    "case": ("case\n", ""), "tcp": ("TCP's\n", ""), "marks": ("marks\n", ""), "p50_ms": ("p50\nms", "ms"),
    "jain": ("Jain\n", ".3f"), "job_share": ("job\n", ".2f"), "tcp_share": ("TCP\n", ".2f"),
    "dropped_percent": ("drop\n%", ".3f"), "rows_missing_percent": ("miss\n%", ".3f"),
    "rows_lost_percent": ("lost\n%", ".3f"), "marked_percent": ("CE\n%", ".1f"), "busy_percent": ("busy\n%", ".0f"),
}  # fmt: skip
#: Of a rank's result ring: many ranks share one machine's memory, and ops are small.
_RING_MIB = 8.0
#: Congestion controls of TCP where none is named.
_CONGESTION = ("reno", "cubic")
#: Seconds between the beginning of a flow and what counts.
_RAMP = 2.0
#: Why rows were missing, as the ledger has it (``observe.ledger``), beside ``lost``.
_LATE = ("late", "refused", "absent")


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
        congestion: congestion controls of TCP, as the kernel names them; none: Reno and Cubic.
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
    """Run ``cases``, print a table, write ``json_file`` after each; return the rows.

    Arguments are the options of the command, sizes in bytes and rates in bit/s.

    Raises:
        ConfigError, CapabilityError: what is asked for cannot be had here; finite queues need root.
        TransportError: a rank failed.
    """
    console = console or Console()
    if "tcp" in cases:
        check_congestion(wanted.congestion)
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
    network = f"{wanted.rate / 1e6:g} Mbit/s, {wanted.queue / 1024:g} KiB before a link"
    show(f"{wanted.size / 1024:g} KiB, {network}", rows, COLUMNS, console)
    return rows


class _Bench:
    """A lab with jobs in it, and what it does phase by phase.

    Args:
        lab: built.
        experiment: with all ranks of all jobs.
        wanted: what is run.
        jobs, ranks: how many, and of each.
        marked: with marks and known speeds.
        apart: seconds of a pause at most.
    """

    def __init__(
        self, lab: Cluster, experiment: Experiment, wanted: Wanted, jobs: int, ranks: int, marked: bool, apart: float
    ) -> None:
        self.lab, self._experiment, self._wanted, self._jobs = lab, experiment, wanted, jobs
        self._ranks, self._marked, self._apart = ranks, marked, apart

    def _phase(self, seconds: float) -> Phase:
        size = self._wanted.size
        return self._experiment.phase(names=[OURS], size=size, seconds=seconds, free=True, apart=self._apart)

    def row(self, case: str, flow: Flow | None = None, *, idle: bool = False) -> dict[str, Any]:
        """Count for the time wanted; ``flow``: TCP that there is meanwhile; ``idle``: and nothing else."""

        def go(seconds: float) -> Phase:
            if not idle:
                return self._phase(seconds)
            time.sleep(seconds)
            return Phase({OURS: []})

        if flow is not None:
            go(_RAMP)
        elsewhere = self.lab.lost_frames()
        before, begin = self._counts(flow), time.monotonic()
        phase = go(self._wanted.seconds)
        after, seconds = self._counts(flow), time.monotonic() - begin
        queue, dropped, marked, link, tcp, again, busy = (now - was for now, was in zip(after, before, strict=True))
        times = phase.times[OURS]
        took = [1e3 * one for by_rank in times for one in by_rank]
        counts = {name: phase.counted(name) or 0 for name in (*_LATE, "lost", "repaired", "on_arrival", "cpu_seconds")}
        expected, delivered = phase.counted("expected") or 0, phase.counted("delivered") or 0
        every, can = max(1, expected), self._wanted.rate / 8 * seconds
        ops = [sum(map(len, times[job :: self._jobs])) / self._ranks / seconds for job in range(self._jobs)]
        ready = self._experiment.ready
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
            "ops_done": min(map(len, times), default=0),
            "jain": figures.jain(ops) if self._jobs > 1 else None,
            "job_link": None if idle else (link - tcp) / can,
            "tcp_share": tcp / can if flow is not None else None,
            "tcp_rtt_ms": flow.rtt_ms if flow is not None else None,
            "tcp_retransmitted": again if flow is not None else None,
            "packets": queue,
            "dropped": dropped,
            "dropped_elsewhere": self.lab.lost_frames() - elsewhere,
            "dropped_on_arrival": counts["on_arrival"],
            "dropped_percent": 100 * dropped / max(1, queue),
            "marked_percent": 100 * marked / max(1, queue),
            "rows": expected,
            "rows_missing_percent": 100 * (expected - delivered) / every,
            "rows_lost_percent": 100 * counts["lost"] / every,
            "rows_late_percent": 100 * sum(counts[name] for name in _LATE) / every,
            "rows_repaired_percent": 100 * counts["repaired"] / every,
            "deadline_hits": phase.counted("deadline_hits") or 0,
            "busy_percent": 100 * busy / seconds,
            "rank_cpu_ms": 1e3 * counts["cpu_seconds"] / max(1, len(took)),
            "datapath": ready[0]["datapath"],
            "result": ready[0]["result"],
            "start_cpu_ms": 1e3 * sum(one["cpu_seconds"] for one in ready) / len(ready),
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
    pause = wanted.apart_ms / 1e3 if apart else 0.0
    # an interface has one XDP program
    with opened(spec, "udp" if jobs > 1 else "auto", console, forked=True) as (lab, _, path):
        assert isinstance(lab, Cluster)
        job = {
            "ranks": ranks, "jobs": jobs, "seed": wanted.seed, "datapath": path,
            "settings": {"rate": wanted.rate / 8 if marked else 0.0, "ring_mib": _RING_MIB},
        }  # fmt: skip
        warm = {"names": [OURS], "size": wanted.size, "rounds": WARM_UP, "free": True, "apart": pause}
        with Experiment(lab, job, console, warm=warm, per_host=jobs, hosts=ranks, forked=True) as experiment:
            experiment.prepare()
            yield _Bench(lab, experiment, wanted, jobs, ranks, marked, pause)


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
