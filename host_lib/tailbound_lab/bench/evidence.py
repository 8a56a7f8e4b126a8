"""``tailbound bench evidence``: the benchmarks that docs/evidence.md rests on, and what they ran on.

Beside the JSON of each benchmark lies ``measured.json``: command, commit, machine, load, how it ended (``measured``).
Run several times, ``apart.json`` has the figures of each run.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from tailbound.errors import ConfigError, TransportError
from tailbound_lab.bench.apart import Apart, compare
from tailbound_lab.bench.apart import table as apart_table
from tailbound_lab.bench.rivals import RIVALS
from tailbound_lab.bench.save import save


class Measurement(NamedTuple):
    """``tailbound`` with ``arguments``; given up after ``minutes``."""

    name: str
    arguments: tuple[str, ...]
    minutes: int


_RIVALS = tuple(word for name in ("gloo", *RIVALS) for word in ("--vs", name))
_FLOORS = tuple(word for floor in ("10", "1", "0.2") for word in ("--floor-ms", floor))
_THOUSANDS = (
    *(word for ranks in (16, 64, 256, 1024, 4096) for word in ("-n", str(ranks))),
    *("--layout", "2d", "--size", "256KiB", "--tail", "3", "--flows", "--warm", "30", "--steps", "100"),
)
_ACCURACY = tuple(word for name in ("gloo", "quantised", "tailbound") for word in ("--variants", name))
_BURSTS = ("--burst-loss", "0.01", "--size", "1MiB", "--iters", "150", "--vs", "gloo", "--vs", "quantised")


def _delays(*transfers: float) -> tuple[str, ...]:
    return tuple(word for delay in transfers for word in ("--delay", f"{delay:g}"))


#: In the order in which they run: what is short first.
MEASUREMENTS = (
    Measurement("error", ("bench", "error"), 4),
    Measurement("rivals", ("bench", "allreduce", "--rate", "1gbit", "--size", "25MiB", "--iters", "30", *_RIVALS), 5),
    Measurement("rivals-bursts", ("bench", "allreduce", *_BURSTS), 4),
    Measurement("tail-small", ("bench", "tail", "--size", "1MiB", "--env", "loss1", "--seconds", "30"), 3),
    Measurement("straggler", ("bench", "straggler"), 6),
    Measurement("simulate", ("simulate", *_THOUSANDS, *_FLOORS, "--cut", "1.2"), 3),
    Measurement("confirm", ("simulate", "--confirm"), 8),
    Measurement("accuracy", ("bench", "train", "--scenario", "accuracy", *_ACCURACY), 8),
    Measurement("drops", ("bench", "drops"), 10),
    Measurement("late", ("bench", "late", "--workers", "4", *_delays(0, 0.5, 1, 2, 4), "--iters", "6"), 4),
    Measurement("late-8", ("bench", "late", "--workers", "8", *_delays(0, 1, 4), "--iters", "4"), 4),
    Measurement("late-second", ("bench", "late", "--workers", "4", *_delays(18), "--iters", "4"), 3),
    Measurement("tail", ("bench", "tail", "--seconds", "45"), 13),
    Measurement("tails", ("bench", "train", "--scenario", "tails-gpt", "--scenario", "tails-conv", "--tail", "3"), 44),
)


def run(
    folder: Path,
    only: Sequence[str] = (),
    *,
    repeat: int = 1,
    measurements: Sequence[Measurement] = MEASUREMENTS,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Runs ``measurements``; one that fails or takes too long does not stop the others.

    Args:
        folder: where the JSON files go.
        only: names; none: all. What was written of others is kept.
        repeat: how often each is run; a table says how far the figures are apart (``apart``).
        measurements: what there is to run.
        console: what the benchmarks say goes to standard output, and what is done goes here.

    Returns:
        The rows of ``measured.json``.

    Raises:
        ConfigError: a name that there is not.
        TransportError: at the end, with the names of those that failed.
    """
    console = console or Console()
    if wrong := set(only) - {each.name for each in measurements}:
        raise ConfigError(f"{', '.join(sorted(wrong))}: choose from {', '.join(each.name for each in measurements)}")
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    found: dict[str, list[Apart]] = {}
    before = _read(folder / "measured.json")
    for each in measurements:
        if only and each.name not in only:
            continue
        files = [folder / f"{name}.json" for name in _names(each.name, repeat)]
        for file in files:
            file.unlink(missing_ok=True)  # else one that fails would leave what was there
            console.print(f"tailbound {' '.join(each.arguments)}", highlight=False, soft_wrap=True)
            command = (*each.arguments, "--json", str(file))
            rows.append(
                {"name": file.stem, "command": f"tailbound {' '.join(each.arguments)}", **_measured(each, command)}
            )
            said = {row["name"] for row in rows}
            save([*(row for row in before if row["name"] not in said), *rows], folder / "measured.json")
            console.print(f"{file.stem}: {rows[-1]['ended']} after {rows[-1]['seconds']:.0f} s", highlight=False)
        runs = [_read(file) for file in files]
        if repeat > 1 and all(runs):
            found[each.name] = compare(runs)
            others = [row for row in _read(folder / "apart.json") if row["measurement"] != each.name]
            save(
                [*others, *(one._asdict() | {"measurement": each.name, "by": one.by} for one in found[each.name])],
                folder / "apart.json",
            )
    if repeat > 1:
        console.print(apart_table(found))
    if failed := [row["name"] for row in rows if row["ended"] != "well"]:
        raise TransportError(f"{', '.join(failed)} did not end well: see the output above")
    return rows


def _names(name: str, repeat: int) -> list[str]:
    """Of the JSON files of the runs of a measurement."""
    return [name, *(f"{name}-{i}" for i in range(2, repeat + 1))]


def _read(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON file; none where there is none."""
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return rows


def _measured(each: Measurement, command: Sequence[str]) -> dict[str, Any]:
    """Runs one, in a process group of its own."""
    about = {
        "commit": commit(), "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "load_before": os.getloadavg()[0],
    }  # fmt: skip
    begin = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "tailbound", *command], process_group=0)
    try:
        status = process.wait(60 * each.minutes)
        ended = "well" if status == 0 else f"with status {status}"
    except subprocess.TimeoutExpired:
        ended = f"given up after {each.minutes} minutes"
    finally:
        _end(process)
    return about | {"seconds": time.monotonic() - begin, "load_after": os.getloadavg()[0], "ended": ended}


def _end(process: subprocess.Popen[bytes]) -> None:
    """A lab removes itself when it is interrupted; what does not end is killed."""
    if process.poll() is None:
        for how, seconds in ((signal.SIGINT, 30), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                return


def commit() -> str | None:
    """The commit that this package's sources are of, with ``-dirty`` where they differ; None without git."""
    try:
        said = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip()
