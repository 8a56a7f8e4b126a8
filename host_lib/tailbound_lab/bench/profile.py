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

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tailbound.errors import ConfigError
from tailbound.kernel import syscalls
from tailbound_lab.bench.allreduce import WARMUP, conditions, title
from tailbound_lab.bench.begin import prepared
from tailbound_lab.bench.places import Place, datapath_at
from tailbound_lab.bench.save import save
from tailbound_lab.bench.team import Team
from tailbound_lab.lab.spec import LabSpec

#: What an op is split into, in the order of the table.
PARTS = ("codec", "system_calls", "xdp_program", "interpreter", "no_processor", "idle")


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

    Args:
        spec: the lab; without root only workers and straggler can be had, on loopback over ``udp``.
        sizes: bytes of float32.
        iters: all-reduces of each size with stamps, and as many without.
        datapath: ``auto``, ``xdp`` or ``udp``.
        json_file: where the rows go.
        console: where the tables go.

    Raises:
        ConfigError, CapabilityError: what is asked for cannot be had here.
        TransportError: a worker failed.
    """
    console = console or Console()
    if iters < 1 or not sizes or min(sizes) < 4 * spec.workers:
        raise ConfigError("a profile needs at least one iteration, and one float32 a worker")
    sizes = [size - size % 4 for size in sizes]
    rows: list[dict[str, Any]] = []
    with prepared(spec, datapath, console) as (place, why_not, line), _counting(place, console) as counted:
        job = {
            "sizes": sizes, "iters": iters, "warmup": WARMUP, "line": str(line), "counted": counted,
            "datapath": datapath_at(place, datapath),
        }  # fmt: skip
        used = ""
        reports: dict[int, dict[int, dict[str, Any]]] = {size: {} for size in sizes}
        with Team(place, "tailbound_lab.bench.profile_worker", job, console) as team:
            while any(len(by_rank) < team.ranks for by_rank in reports.values()):
                rank, message = team.next()
                if message["kind"] == "ready":
                    used = message["datapath"]
                elif message["kind"] == "size":
                    reports[message["size"]][rank] = message
            team.finish()
    for size in sizes:
        settings = conditions(spec, why_not is None) | {"datapath": used}
        new = summarize(size, [reports[size][rank] for rank in range(spec.workers)], settings)
        console.print(table(new))
        rows += new
    save(rows, json_file)
    return rows


@contextmanager
def _counting(place: Place, console: Console) -> Iterator[bool]:
    """Lets the kernel count run times of programs meanwhile; whether it does."""
    fd = -1
    if place.xdp:
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


def summarize(size: int, ranks: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of one size, by rank: medians in ms, and what they are short of the median op (``rest_ms``)."""
    runs = [[op["program"] for op in ops] for ops in zip(*(report["ops"] for report in ranks), strict=True)]
    programs = [None if None in op else fmean(op) for op in runs]
    rows = []
    for rank, report in enumerate(ranks):
        parts = [split(op, program) for op, program in zip(report["ops"], programs, strict=True)]
        medians: dict[str, float | None] = {f"{name}_ms": median(part[name] for part in parts) / 1e6 for name in PARTS}
        op_ms = median(op["wall"] for op in report["ops"]) / 1e6
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
                "other_threads_ms": median(op["others"] for op in report["ops"]) / 1e6,
                "unstamped_ms": median(report["plain"]) / 1e6,
                "functions": {
                    name: {"ms": ns / iters / 1e6, "calls": calls / iters}
                    for name, (ns, calls) in sorted(report["functions"].items(), key=lambda item: -item[1][0])
                },
                **settings,
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows of one size, narrow enough for 80 columns."""
    first = rows[0]
    plain = median(row["unstamped_ms"] for row in rows)
    head = f"{title(first)}\n{first['bytes']} B, medians in ms; without stamps an op takes {plain:.2f} ms"
    result = Table(title=head, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    headings = (
        "rank\n", "op\n", "codec\n", "system\ncalls", "XDP\nprogram", "inter-\npreter", "no pro-\ncessor", "idle\n",
        "rest\n", "other\nthreads",
    )  # fmt: skip
    for heading in headings:
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = (row[f"{name}_ms"] for name in ("op", *PARTS, "rest", "other_threads"))
        result.add_row(str(row["rank"]), *("-" if cell is None else f"{cell:.2f}" for cell in cells))
    return result
