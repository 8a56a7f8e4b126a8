"""``tailbound neighbours``: incast of many ranks, two jobs on one network, a job beside TCP. In the simulator.

Each case runs twice: with marks and the speed of the links known, and without, which is how senders behave where no
switch marks and no driver tells a speed: bursts of whole super-frames, and a rate that follows round trips alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tailbound.bench.save import save
from tailbound.simulate.neighbours import Shares, share
from tailbound.simulate.ports import Switching

#: Of a port's buffer, from which on it marks, as in the lab.
_MARKED = 4
#: What is not said of a row.
_NONE = "-"


@dataclass(frozen=True)
class _Case:
    name: str
    ranks: int
    settings: dict[str, Any]


def cases(ranks: int, few: int, apart_ms: float) -> list[_Case]:
    """What is run: ``ranks`` in the incast, ``few`` in each job that has neighbours, ``apart_ms`` between launches."""
    apart = {"apart": int(apart_ms * 1e6)}
    return [
        _Case("incast", ranks, apart | {"warm": 0.5, "seconds": 1.0}),
        _Case("one job", few, {}),
        _Case("two jobs", few, apart | {"jobs": 2}),
        _Case("TCP with ECN", few, {"tcp": 1, "ecn": True}),
        _Case("TCP without", few, {"tcp": 1, "ecn": False}),
    ]


def run(
    *,
    ranks: int = 64,
    few: int = 4,
    size: int = 1 << 20,
    rate: int = 10**8,
    buffer: int = 64 << 10,
    apart_ms: float = 10.0,
    seconds: float = 4.0,
    seed: int = 1,
    json_file: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Runs all cases, prints a table, and writes ``json_file`` after each; returns the rows.

    Args:
        ranks: of the incast.
        few: of each job that has neighbours.
        size: bytes of float32 of an op.
        rate: of every link, bit/s.
        buffer: bytes that wait before it at most.
        apart_ms: ranks pause for up to so long before each op, where they are to be out of step.
        seconds: simulated ones that count; the incast has one.
        seed: of everything.
        json_file: for the rows.
        console: for the table.
    """
    console = console or Console()
    marking = Switching(rate=rate, buffer=buffer, mark=buffer // _MARKED)
    rows: list[dict[str, Any]] = []
    alone: dict[bool, float] = {}
    for case in cases(ranks, few, apart_ms):
        for marks in (True, False):
            switching = marking if marks else replace(marking, mark=0)
            settings = {"seconds": seconds, "known": marks, "seed": seed} | case.settings
            got = share(case.ranks, size, switching, **settings)
            if case.name == "one job":
                alone[marks] = got.ops[0]
            rows.append(_row(case, got, marks, alone.get(True)))
            save(rows, json_file)
    console.print(_table(rows, f"{size / 1024:g} KiB, {rate / 1e6:g} Mbit/s, {buffer / 1024:g} KiB a port, simulated"))
    return rows


def _row(case: _Case, got: Shares, marks: bool, alone: float | None) -> dict[str, Any]:
    return {
        "case": case.name,
        "ranks": case.ranks,
        "marks": marks,
        "p50_ms": max(got.took),
        "ops": got.ops,
        "job_share": got.ops[0] / alone if alone and case.settings.get("tcp") else None,
        "tcp_share": got.tcp[0] if got.tcp else None,
        "jain": got.jain if len(got.ops) > 1 else None,
        "dropped_percent": 100 * got.dropped / max(1, got.packets),
        "rows_lost_percent": 100 * (1 - got.delivered / max(1, got.expected)),
        "marked_percent": 100 * got.marked / max(1, got.packets),
    }


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown = {
        "case": "case", "ranks": "ranks", "marks": "marks", "p50_ms": "p50 ms", "jain": "Jain", "job_share": "job",
        "tcp_share": "TCP", "dropped_percent": "drop%", "rows_lost_percent": "lost%", "marked_percent": "CE%",
    }  # fmt: skip
    for key, short in shown.items():
        out.add_column(short, justify="left" if key == "case" else "right", no_wrap=True)
    for row in rows:
        out.add_row(*(_text(row[key]) for key in shown))
    return out


def _text(value: Any) -> str:
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
