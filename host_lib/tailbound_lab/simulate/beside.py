"""``tailbound bench neighbours --simulated``: incast of many ranks, a job beside TCP, two jobs on one network.

As ``bench.neighbours`` does it in a lab, with the same rows, and the engine in virtual time: no rank waits for a core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tailbound.errors import ConfigError
from tailbound_lab.bench.neighbours import CASES, Wanted, conditions, table
from tailbound_lab.bench.save import save
from tailbound_lab.bench.table import show
from tailbound_lab.simulate.neighbours import Shares, share
from tailbound_lab.simulate.ports import Switching

#: Of a port's buffer, from which on it marks, as in the lab.
_MARKED = 4


@dataclass(frozen=True)
class _Case:
    of: str
    name: str
    ranks: int
    settings: dict[str, Any]


def _cases(wanted: Wanted) -> list[_Case]:
    apart = {"apart": int(wanted.apart_ms * 1e6)}
    return [
        _Case("incast", "incast", wanted.ranks, apart | {"warm": 0.5, "seconds": min(1.0, wanted.seconds)}),
        _Case("tcp", "job", wanted.few, {}),
        _Case("tcp", "job, TCP", wanted.few, {"tcp": 1, "ecn": True}),
        _Case("tcp", "job, TCP", wanted.few, {"tcp": 1, "ecn": False}),
        _Case("jobs", "two jobs", wanted.few, apart | {"jobs": 2}),
    ]


def run(
    wanted: Wanted,
    *,
    cases: Sequence[str] = CASES,
    marks: Sequence[bool] = (True, False),
    json_file: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Runs ``cases``, prints a table, and writes ``json_file`` after each; returns the rows.

    Args:
        wanted: what is run; ``seconds`` are simulated ones, of which the incast has one at most. TCP is Reno.
        cases: of ``CASES``.
        marks: with marks and a known speed, without, or both.
        json_file: for the rows.
        console: for the table.

    Raises:
        ConfigError: another congestion control of TCP is asked for.
    """
    if set(wanted.congestion) - {"reno"}:
        raise ConfigError("the simulator's TCP is reno: run without --congestion, or without --simulated")
    marking = Switching(rate=wanted.rate, buffer=wanted.queue, mark=wanted.queue // _MARKED)
    rows: list[dict[str, Any]] = []
    alone: dict[bool, float] = {}
    for case in (one for one in _cases(wanted) if one.of in cases):
        for marked in marks:
            switching = marking if marked else replace(marking, mark=0)
            settings = {"seconds": wanted.seconds, "known": marked, "seed": wanted.seed} | case.settings
            got = share(case.ranks, wanted.size, switching, **settings)
            if case.name == "job":
                alone[marked] = got.ops[0]
            rows.append(_row(case, got, marked, alone.get(marked)))
            save(rows, json_file)
    show(f"{wanted.size / 1024:g} KiB, {conditions(wanted.rate, wanted.queue)}, simulated", table(rows), console)
    return rows


def _row(case: _Case, got: Shares, marked: bool, alone: float | None) -> dict[str, Any]:
    took = [one for one in got.took if one is not None]
    return {
        "case": case.name,
        "tcp": ("reno ECN" if case.settings["ecn"] else "reno") if got.tcp else None,
        "ranks": case.ranks,
        "marks": marked,
        "p50_ms": max(took) if len(took) == len(got.ops) else None,
        "ops": got.ops,
        "job_share": got.ops[0] / alone if alone and got.tcp else None,
        "tcp_share": got.tcp[0] if got.tcp else None,
        "jain": got.jain if len(got.ops) > 1 else None,
        "dropped_percent": 100 * got.dropped / max(1, got.packets),
        "rows_missing_percent": 100 * (1 - got.delivered / max(1, got.expected)),
        "kinds": got.kinds,
        "marked_percent": 100 * got.marked / max(1, got.packets),
    }
