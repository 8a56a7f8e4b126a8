"""Rows of ``tailbound bench straggler``."""

from __future__ import annotations

import io
from types import ModuleType

import pytest
from rich.console import Console

from tailbound.errors import ConfigError
from tailbound_lab.bench import allreduce, profile, straggler
from tailbound_lab.bench.straggler import OURS, PLAIN, THEIRS, run, summarize, table
from tailbound_lab.lab.spec import LabSpec, Straggler

MS = 1_000_000


def report(launch: int, ends: dict[str, list[int]], owns: float = 0.0) -> dict:  # type: ignore[type-arg]
    return {
        "times": {name: [[launch * MS, end * MS] for end in found] for name, found in ends.items()},
        "rows": {OURS: [100, 100], PLAIN: [100, 95]},
        "owns": {OURS: owns, PLAIN: 0.5},
        "datapath": "xdp",
    }


def test_exposed_is_from_the_stragglers_launch_to_the_last_end() -> None:
    others = report(0, {OURS: [70, 60, 80], PLAIN: [90, 90, 95], THEIRS: [120, 130, 110]})
    straggler = report(50, {OURS: [65, 75, 60], PLAIN: [95, 80, 80], THEIRS: [100, 100, 100]})
    rows = {row["name"]: row for row in summarize(4000, 50.0, [others, straggler], {"datapath": "", "rate": None})}
    assert rows[OURS]["exposed_ms"] == 25
    assert (rows[OURS]["exposed_min_ms"], rows[OURS]["exposed_max_ms"]) == (20, 30)
    assert rows[PLAIN]["exposed_ms"] == 45
    assert rows[THEIRS]["exposed_ms"] == 70
    assert {row["delay_ms"] for row in rows.values()} == {50.0}
    assert {row["workers"] for row in rows.values()} == {2}
    assert rows[PLAIN]["delivered"] == 0.95
    assert rows[OURS]["straggler_owns"] == 0.0
    assert rows[THEIRS]["datapath"] == "tcp"


def test_the_table_has_a_line_a_delay() -> None:
    ends = {name: [80, 80] for name in (OURS, PLAIN, THEIRS)}
    rows = []
    for delay in (0.0, 50.0):
        rows += summarize(4000, delay, [report(0, ends), report(int(delay), ends)], {"datapath": "", "rate": None})
    out = io.StringIO()
    Console(file=out, width=80).print(table(rows))
    assert "80.0" in out.getvalue()
    assert "30.0" in out.getvalue()


@pytest.mark.parametrize(
    "wrong", [{"iters": 1}, {"delays": ()}, {"delays": (-1.0,)}, {"delays": (900.0,)}, {"size": 64}]
)
def test_what_cannot_be_measured_is_refused(wrong: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError):
        run(LabSpec(2), **wrong)


@pytest.mark.parametrize("benchmark", [allreduce, profile, straggler])
def test_a_straggler_that_computes_in_steps_is_refused_where_there_are_none(benchmark: ModuleType) -> None:
    with pytest.raises(ConfigError, match="give RANK:MS:EVERY, such as 1:40:160"):
        benchmark.run(LabSpec(2, straggler=Straggler(1, 40.0, None)))
