"""``tailbound bench profile``: what one all-reduce spends its time on, rank by rank.

The time from the common start to a rank's result is that of its transport thread, which does the op, and of the thread
that asked for it and waits. It is split by their processor time, by stamps around compiled code and system calls
(``stopwatch``), by the kernel's own count of the XDP program's run time, and by how long the thread waited for a
processor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console

from tailbound.kernel import syscalls
from tailbound_lab.bench.allreduce import WARM_UP, check, title
from tailbound_lab.bench.channel import OURS
from tailbound_lab.bench.experiment import Experiment, Phase, opened
from tailbound_lab.bench.stopwatch import STAMPED
from tailbound_lab.bench.table import Columns, save, show
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import LabSpec

#: What an op is split into, in the order of the table.
PARTS = ("codec", "system_calls", "xdp_program", "interpreter", "no_processor", "idle")
COLUMNS: Columns = {
    "rank": ("rank\n", "d"), "op_ms": ("op\n", ".2f"), "codec_ms": ("codec\n", ".2f"),
    "system_calls_ms": ("system\ncalls", ".2f"), "xdp_program_ms": ("XDP\nprogram", ".2f"),
    "interpreter_ms": ("inter-\npreter", ".2f"), "no_processor_ms": ("no pro-\ncessor", ".2f"),
    "idle_ms": ("idle\n", ".2f"), "rest_ms": ("rest\n", ".2f"), "other_threads_ms": ("other\nthreads", ".2f"),
}  # fmt: skip


def run(
    spec: LabSpec,
    *,
    sizes: Sequence[int] = (1 << 20, 25 << 20),
    iters: int = 30,
    datapath: str = "auto",
    json_file: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Measures, prints a table a size, writes ``json_file``; returns the rows, one a size and rank.

    Arguments are the options of the command, sizes in bytes and rates in bit/s.

    Raises:
        ConfigError, CapabilityError: what is asked for cannot be had here.
        TransportError: a worker failed.
    """
    console = console or Console()
    check(spec, sizes, iters)
    rows: list[dict[str, Any]] = []
    with (
        opened(spec, datapath, console) as (lab, about, path),
        _counting(lab, console) as counted,
        Experiment(lab, {"datapath": path, "counted": counted}, console) as experiment,
    ):
        about["datapath"] = experiment.datapath
        for size in (size - size % 4 for size in sizes):
            experiment.phase(names=[STAMPED], size=size, rounds=WARM_UP)
            phase = experiment.phase(names=[STAMPED, OURS], size=size, rounds=iters)
            new = summarize(size, phase, about)
            plain = median(row["unstamped_ms"] for row in new)
            head = f"{title(new[0])}\n{size} B, medians in ms; without stamps an op takes {plain:.2f} ms"
            show(head, new, COLUMNS, console)
            rows += new
    save(rows, json_file)
    return rows


@contextmanager
def _counting(lab: Cluster, console: Console) -> Iterator[bool]:
    """Lets the kernel count run times of programs meanwhile; whether it does."""
    fd = -1
    if lab.xdp:
        try:
            fd = syscalls.count_run_time()
        except OSError as error:
            console.print(f"system calls have the XDP program in them: {error}", highlight=False, soft_wrap=True)
    try:
        yield fd >= 0
    finally:
        if fd >= 0:
            os.close(fd)


def split(op: Mapping[str, int], program: float | None) -> dict[str, float]:
    """Parts of one op of one rank in ns, of ``PARTS``; none is below 0.

    Args:
        op: as a worker reports it.
        program: run time of the XDP programs, the mean of the ranks: a rank's system calls run its peers' programs.
    """
    left = max(0, op["wall"] - op["thread"] - op["own"])
    waited = min(op["waited"], left)
    within = 0.0 if program is None else min(program, op["calls"])
    return {
        "codec": op["codec"],
        "system_calls": op["calls"] - within,
        "xdp_program": within,
        "interpreter": max(0, op["thread"] - op["codec"] - op["calls"]) + op["own"],
        "no_processor": waited,
        "idle": left - waited,
    }


def summarize(size: int, phase: Phase, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return rows of one size, by rank: medians in ms, and what they are short of the median op (``rest_ms``)."""
    ranks = phase.reports
    runs = [[op["program"] for op in ops] for ops in zip(*(report["stamps"] for report in ranks), strict=True)]
    programs = [None if None in op else fmean(op) for op in runs]
    rows = []
    for rank, report in enumerate(ranks):
        parts = [split(op, program) for op, program in zip(report["stamps"], programs, strict=True)]
        medians: dict[str, float | None] = {f"{name}_ms": median(part[name] for part in parts) / 1e6 for name in PARTS}
        op_ms = median(op["wall"] for op in report["stamps"]) / 1e6
        iters = len(parts)
        if None in programs:
            medians["xdp_program_ms"] = None
        rows.append(
            {
                "name": "tailbound",
                "rank": rank,
                "workers": len(ranks),
                "bytes": size,
                "iters": iters,
                "op_ms": op_ms,
                **medians,
                "rest_ms": op_ms - sum(value for value in medians.values() if value is not None),
                "other_threads_ms": median(op["others"] for op in report["stamps"]) / 1e6,
                "unstamped_ms": 1e3 * median(phase.times[OURS][rank]),
                "functions": {
                    name: {"ms": ns / iters / 1e6, "calls": calls / iters}
                    for name, (ns, calls) in sorted(report["functions"].items(), key=lambda item: -item[1][0])
                },
                **about,
            }
        )
    return rows
