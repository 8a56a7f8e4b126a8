"""``tailbound bench allreduce``: whole all-reduces between worker processes, interleaved with Gloo's and others'.

Every iteration begins at one moment for all ranks (``start``) and takes as long as the slowest of them. Tailbound and
the others take turns, iteration by iteration, in alternating order, so that all see the same state of the machine.
``vs="unpaced"`` is Tailbound in the same processes, with nothing that slows its senders down. What goes over TCP runs
on the lab's link without Tailbound's XDP program; ``wire`` makes packets wire-sized on both links. With
``datapath="switch"`` the lab's switch sums; ``vs="transpose"`` then compares it with the same lab without its help.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tailbound.errors import ConfigError
from tailbound.settings.table import RESULT
from tailbound_lab.bench import figures, picture, turns
from tailbound_lab.bench.allreduce_plot import draw
from tailbound_lab.bench.begin import prepared
from tailbound_lab.bench.meter import per_op
from tailbound_lab.bench.places import datapath_at
from tailbound_lab.bench.rivals import RIVALS
from tailbound_lab.bench.save import save
from tailbound_lab.bench.team import Team
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import LabSpec

#: Iterations before those that count: connections, scales, caches, DVFS.
WARMUP = 5


def run(
    spec: LabSpec,
    *,
    sizes: Sequence[int] = (25 << 20, 1 << 20),
    iters: int = 50,
    vs: Sequence[str] = ("gloo",),
    datapath: str = "auto",
    per_host: int = 1,
    rest: float = 0.0,
    known: bool = False,
    json_file: Path | None = None,
    plot: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Measures, prints a table, writes ``json_file``; returns its rows.

    Args:
        spec: the lab; without root only workers and straggler can be had, on loopback over ``udp``.
        sizes: bytes of float32.
        iters: all-reduces of each size and kind.
        vs: ``gloo``, ``unpaced`` and any of ``RIVALS``, or ``transpose`` alone (with ``datapath="switch"`` only), or
            nobody.
        datapath: ``auto``, ``xdp``, ``udp`` or ``switch``.
        per_host: ranks in every worker. With more than one they share a cable, over ``udp``; the ranks of a worker that
            share buckets (``node_group``) are measured in turn with ranks that stand for themselves, ``flat``.
        rest: seconds before every all-reduce, in which nothing is sent.
        known: ranks are told the rate of ``spec``; a virtual link calls itself faster.
        json_file: where the rows go.
        plot: where the picture goes; None: beside ``json_file``, if there is one and matplotlib is there.
        console: where the table goes.

    Raises:
        ConfigError, CapabilityError: what is asked for cannot be had here.
        TransportError: a worker failed.
    """
    console = console or Console()
    if iters < 1 or not sizes or min(sizes) < 4 * spec.workers:
        raise ConfigError("an all-reduce benchmark needs at least one iteration, and one float32 a worker")
    by_turns = "transpose" in vs
    if by_turns and (datapath != "switch" or len(vs) > 1):
        raise ConfigError("--vs transpose, alone, compares a switch with the ranks' own sums: give --datapath switch")
    if wrong := [name for name in vs if name not in ("gloo", turns.UNPACED, "transpose", *RIVALS)]:
        there = ", ".join(("gloo", turns.UNPACED, *RIVALS))
        raise ConfigError(f"nobody to compare with is called {', '.join(wrong)}: give {there}")
    if per_host > 1 and (datapath not in ("auto", "udp") or set(vs) - {"gloo"}):
        raise ConfigError("several ranks on a worker share its interface over udp: give neither --datapath nor --vs")
    if "halving" in vs and spec.workers & (spec.workers - 1):
        raise ConfigError(f"halving-doubling of {spec.workers} workers: give a power of two")
    if datapath == "switch":
        spec = dataclasses.replace(spec, switch=True)
    sizes = [size - size % 4 for size in sizes]
    plot = picture.where(plot, json_file, console)
    with prepared(spec, datapath, console, per_host) as (place, why_not, line):
        job = {
            "sizes": sizes, "iters": iters, "warmup": WARMUP, "line": str(line),
            "vs": [] if by_turns else list(dict.fromkeys(vs)),
            "datapath": datapath_at(place, datapath), "rest": rest, "known": (spec.rate or 0) / 8 if known else 0.0,
        }  # fmt: skip
        used: dict[str, str] = {}
        module = "worker" if per_host == 1 else "node_worker"

        def measure(path: str, count: int) -> turns.Reports:
            if path == "switch" and isinstance(place, Cluster):
                place.switch.renew()  # a cookie serves one run of the workers
            # without a switch results go to each peer, unless something else is asked for
            env = {RESULT.variable: os.environ.get(RESULT.variable, "peers")} if by_turns else {}
            here = job | {"datapath": path, "iters": count}
            with Team(place, f"tailbound_lab.bench.{module}", here, console, env=env, per_host=per_host) as team:
                reports, used[path] = _follow(team, sizes, count, console)
            return reports

        if by_turns:
            ways = {"tailbound": datapath, "transpose": "auto"}
            reports = turns.in_turn(ways, iters, measure)
        else:
            ways = {"tailbound": str(job["datapath"])}
            reports = measure(ways["tailbound"], iters)
            if turns.UNPACED in vs:
                ways[turns.UNPACED] = ways["tailbound"]
            if per_host > 1:
                ways["flat"] = ways["tailbound"]
    rows = []
    settings = conditions(spec, why_not is None) | ({"per_host": per_host} if per_host > 1 else {})
    paths = {name: used[path] for name, path in ways.items()}
    for size in sizes:
        rows += summarize(size, reports[size], settings, paths)
    console.print(table(rows))
    save(rows, json_file)
    picture.write(draw, rows, plot, console)
    return rows


def conditions(spec: LabSpec, lab: bool) -> dict[str, Any]:
    """What the rows say of the network they were measured on."""
    return {
        "lab": lab,
        "wire": spec.wire_size,
        "rate": spec.rate,
        "loss": spec.loss,
        "burst_loss": None if spec.burst is None else {"loss": spec.burst.loss, "length": spec.burst.length},
        "straggler": None if spec.straggler is None else str(spec.straggler),
    }


def summarize(
    size: int, ranks: Sequence[dict[str, Any]], settings: dict[str, Any], paths: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Rows of one size, Tailbound's first, from what every rank reported; ``paths``: datapath by row name.

    ``ratio_p50``, p50 over Tailbound's, of the first of the others is in Tailbound's row, of more of them in their own.
    """
    rows = []
    for name in ranks[0]["times"]:
        times = figures.slowest([report["times"][name] for report in ranks])
        p50 = figures.percentile(times, 50)
        errors = [error for report in ranks for error in report["nmse"][name]]
        ours = name in paths
        expected, delivered, hits, carried = (turns.number_of(ranks, what, name) for what in turns.NUMBERS)
        rows.append(
            {
                "name": name,
                "workers": len(ranks),
                "bytes": size,
                "iters": len(times),
                "p50_ms": p50 * 1e3,
                "p99_ms": figures.percentile(times, 99) * 1e3,
                "max_ms": max(times) * 1e3,
                "min_ms": min(times) * 1e3,
                "algbw_gbps": figures.algbw(size, p50),
                "busbw_gbps": figures.busbw(size, p50, len(ranks)),
                "delivered": (delivered or 0) / expected if ours and expected else 1.0,
                "deadline_hits": hits if ours else 0,
                "link_bytes_per_op": carried / len(ranks) / len(times) if ours and carried is not None else None,
                "nmse": sum(errors) / len(errors) if errors else None,
                **per_op((entry for report in ranks for entry in report["spent"]), name),
                **settings,
                "datapath": paths[name] if ours else "tcp",
            }
        )
    first, *others = rows
    for number, row in enumerate(others):
        (row if number else first)["ratio_p50"] = row["p50_ms"] / first["p50_ms"]
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows in the manner of nccl-tests, narrow enough for 80 columns; CPU is that of a rank, GB are 10**9 bytes."""
    result = Table(title=title(rows[0]), title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    result.add_column("\nsize B", justify="right", no_wrap=True)
    result.add_column("\nwho", no_wrap=True)
    for heading in ("p50\nms", "p99\nms", "max\nms", "CPU\nms", "busbw\nGB/s", "arrived\n%", "late\n", "\nNMSE"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("p50\nratio", justify="right", no_wrap=True)
    last = None
    for row in rows:
        if last not in (None, row["bytes"]):
            result.add_section()
        last = row["bytes"]
        ratio = row.get("ratio_p50")
        result.add_row(
            str(row["bytes"]), row["name"], *(_ms(row[name]) for name in ("p50_ms", "p99_ms", "max_ms", "cpu_ms")),
            f"{row['busbw_gbps']:.2f}", f"{100 * row['delivered']:.3f}",
            str(row["deadline_hits"]), "-" if row["nmse"] is None else f"{row['nmse']:.1e}",
            "" if ratio is None else f"{ratio:.2f}",
        )  # fmt: skip
    return result


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1e4 else f"{value:.0f}"


def title(row: Mapping[str, Any]) -> str:
    """Ranks and network of a row, for the head of a table."""
    parts = [f"all-reduce of float32, {row['workers']} workers", "lab" if row["lab"] else "loopback"]
    parts.append(f"datapath {row['datapath']}")
    parts.append("packets of wire size" if row["wire"] else "TCP with offloads")
    if row.get("per_host", 1) > 1:
        parts.append(f"{row['per_host']} a host")
    if row["rate"]:
        parts.append(f"{row['rate'] / 1e6:g} Mbit/s")
    if row["loss"]:
        parts.append(f"loss {row['loss']:.2%}")
    if row["burst_loss"]:
        parts.append(f"bursty loss {row['burst_loss']['loss']:.2%}")
    if row["straggler"]:
        parts.append(f"straggler {row['straggler']}")
    return ", ".join(parts)


def _follow(
    team: Team, sizes: Sequence[int], iters: int, console: Console
) -> tuple[dict[int, list[dict[str, Any]]], str]:
    """Shows progress until all sizes are measured; reports by size and rank, and the datapath used."""
    reports: dict[int, dict[int, dict[str, Any]]] = {size: {} for size in sizes}
    used: dict[int, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = {size: progress.add_task(f"{size:>11} B", total=iters) for size in sizes}
        while any(len(by_rank) < team.ranks for by_rank in reports.values()):
            rank, message = team.next()
            if message["kind"] == "ready":
                used[rank] = message["datapath"]
            elif message["kind"] == "progress":
                progress.update(tasks[message["size"]], completed=message["done"])
            elif message["kind"] == "size":
                size = message["size"]
                reports[size][rank] = message
                if len(reports[size]) == team.ranks:
                    progress.update(tasks[size], completed=iters)
                    if not console.is_terminal:
                        console.print(f"{size} B: {iters} iterations done", highlight=False)
    team.finish()
    return (
        {size: [by_rank[rank] for rank in range(team.ranks)] for size, by_rank in reports.items()},
        "+".join(sorted(set(used.values()))),
    )
