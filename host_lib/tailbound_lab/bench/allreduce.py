"""``tailbound bench allreduce``: whole all-reduces of worker processes, in turn with Gloo's or our codes over TCP.

Every iteration begins at one moment for all ranks (``start``) and takes as long as the slowest of them. All take turns,
iteration by iteration, in alternating order, so that they see the same state of the machine. TCP runs on the lab's link
without Tailbound's XDP program; ``wire`` makes packets wire-sized on both links. With ``datapath="switch"`` the lab's
switch sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tailbound.errors import ConfigError
from tailbound_lab.bench.channel import GLOO, OURS
from tailbound_lab.bench.experiment import Experiment, opened, rows_of
from tailbound_lab.bench.table import Columns, save, show
from tailbound_lab.lab.spec import LabSpec

#: Iterations before those that count, and those whose results are compared with the exact mean.
WARM_UP, _COMPARED = 5, 8
#: Columns of rows of all-reduces.
COLUMNS: Columns = {
    "bytes": ("\nsize B", "d"), "name": ("\nwho", ""), "p50_ms": ("p50\nms", "ms"), "p99_ms": ("p99\nms", "ms"),
    "max_ms": ("max\nms", "ms"), "cpu_ms": ("CPU\nms", "ms"),
    "delivered": ("arrived\n%", "%"), "deadline_hits": ("late\n", "d"), "nmse": ("\nNMSE", ".1e"),
    "ratio_p50": ("p50\nratio", ".2f"),
}  # fmt: skip


def run(
    spec: LabSpec,
    *,
    sizes: Sequence[int] = (25 << 20, 1 << 20),
    iters: int = 50,
    vs: Sequence[str] = (GLOO,),
    datapath: str = "auto",
    json_file: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Measure, print a table, write ``json_file``; return its rows.

    Arguments are the options of the command, sizes in bytes and rates in bit/s.

    Raises:
        ConfigError, CapabilityError: what is asked for cannot be had here.
        TransportError: a worker failed.
    """
    console = console or Console()
    if iters < 1 or not sizes or min(sizes) < 4 * spec.workers:
        raise ConfigError("all-reduces to measure need at least one iteration, and one float32 a worker")
    if datapath == "switch":
        spec = dataclasses.replace(spec, switch=True)
    rows: list[dict[str, Any]] = []
    with opened(spec, datapath, console) as (lab, about, path):
        if path == "switch":
            lab.switch.renew()  # a cookie serves one run of the workers
        names = [OURS, *dict.fromkeys(vs)]
        with Experiment(lab, {"names": names, "datapath": path}, console) as experiment:
            about["datapath"] = experiment.datapath
            for size in (size - size % 4 for size in sizes):
                console.print(f"{size} B: {iters} iterations", highlight=False)
                experiment.phase(names=names, size=size, rounds=WARM_UP)
                phase = experiment.phase(names=names, size=size, rounds=iters, compare=max(1, iters // _COMPARED))
                rows += rows_of(phase, size, about)
    show(title(rows[0]), rows, COLUMNS, console)
    save(rows, json_file)
    return rows


def title(row: Mapping[str, Any]) -> str:
    """Return ranks and network of a row, for the head of a table."""
    parts = [f"all-reduce of float32, {row['workers']} workers", f"datapath {row['datapath']}"]
    parts.append("packets of wire size" if row["wire"] else "TCP with offloads")
    if row["rate"]:
        parts.append(f"{row['rate'] / 1e6:g} Mbit/s")
    if row["loss"]:
        parts.append(f"loss {row['loss']:.2%}")
    if row["burst_loss"]:
        parts.append(f"bursty loss {row['burst_loss']['loss']:.2%}")
    if row["straggler"]:
        parts.append(f"straggler {row['straggler']}")
    return ", ".join(parts)
