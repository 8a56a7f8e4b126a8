"""Rows and tables made of the phases of an experiment, taking turns, ending together."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tailbound.errors import ConfigError
from tailbound_lab.bench import allreduce, table, tail
from tailbound_lab.bench.channel import order_of
from tailbound_lab.bench.experiment import Phase, conditions, rows_of
from tailbound_lab.bench.start import StartLine
from tailbound_lab.lab.spec import Burst, LabSpec, Straggler

ABOUT = conditions(LabSpec(2, burst=Burst(0.01, 8), wire=True)) | {"datapath": "xdp"}


def report(rank: int, counted: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    base = {
        "rank": rank,
        "counted": {"expected": 100, "delivered": 100, "deadline_hits": 0, "link_bytes": 6_000_000} | (counted or {}),
        "nmse": {"tailbound": [1e-3, 3e-3], "gloo": [1e-14]},
        "spent": [["tailbound", 0.05, 0.02 if rank == 0 else 0.0, 1], ["gloo", 0.1, None, 1]],
    }
    return base | values


def phase() -> Phase:
    times = {"tailbound": [[0.1, 0.3], [0.2, 0.1]], "gloo": [[0.5], [0.7]]}
    first = report(0, {"delivered": 99, "deadline_hits": 2})
    return Phase(times, [first, report(1)])


def test_names_take_turns() -> None:
    assert [order_of(["a", "b"], i) for i in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    found = phase()
    assert found.slowest("tailbound") == [0.2, 0.3]
    assert found.slowest("tailbound", without=1) == [0.1, 0.3]
    assert found.slowest("gloo") == [0.7]
    assert found.slowest("nobody") == []
    found.add(Phase({"tailbound": [[0.4], [0.1]]}, [report(0)]))
    assert found.slowest("tailbound") == [0.2, 0.3, 0.4]
    assert len(found.reports) == 3


def test_rows_are_made_of_the_slowest_ranks_and_of_counts_of_all() -> None:
    ours, theirs = rows_of(phase(), 4_000_000, ABOUT)
    assert (ours["name"], ours["workers"], ours["bytes"], ours["iters"]) == ("tailbound", 2, 4_000_000, 2)
    assert (ours["p50_ms"], ours["p99_ms"], ours["max_ms"], ours["mean_ms"]) == (200, 300, 300, pytest.approx(250))
    assert ours["tail"] == pytest.approx(1.5)
    assert (ours["delivered"], ours["deadline_hits"]) == (199 / 200, 2)
    assert ours["nmse"] == pytest.approx(2e-3)
    assert (ours["cpu_ms"], ours["kernel_ms"]) == (pytest.approx(60), pytest.approx(10))
    assert (theirs["cpu_ms"], theirs["kernel_ms"]) == (pytest.approx(100), None)
    assert (ours["link_bytes_per_op"], theirs["link_bytes_per_op"]) == (3_000_000, None)
    assert (ours["datapath"], ours["wire"], ours["burst_loss"]) == ("xdp", True, {"loss": 0.01, "length": 8})
    assert (theirs["max_ms"], theirs["delivered"], theirs["datapath"]) == (700, 1.0, "tcp")
    assert ("ratio_p50" in ours, theirs["ratio_p50"]) == (False, pytest.approx(3.5))
    (one, _) = rows_of(phase(), 8, ABOUT, without=0)
    assert (one["delivered"], one["deadline_hits"], one["max_ms"]) == (1.0, 0, 200)
    (alone,) = rows_of(Phase({"tailbound": [[0.1]], "gloo": [[]]}), 8, ABOUT)
    assert (alone["name"], alone["cpu_ms"], alone["delivered"]) == ("tailbound", None, None)


def test_a_row_with_stamps_has_the_medians_of_all_ranks() -> None:
    ops = [{"codec": codec, "interpreter": 2.0} for codec in (1.0, 3.0)]
    reports = [report(rank, stamps=ops[: rank + 1]) for rank in range(2)]
    _, row = rows_of(Phase({name: [[0.1], [0.2]] for name in ("tailbound", "stamped")}, reports), 8, ABOUT)
    assert (row["codec_ms"], row["interpreter_ms"], row["datapath"], row["delivered"]) == (1.0, 2.0, "xdp", 1.0)


@pytest.mark.parametrize("columns", [allreduce.COLUMNS, tail.COLUMNS])
def test_the_table_fits_a_terminal_and_shows_every_row(columns: table.Columns) -> None:
    """Also when TCP has waited for its timer, over and over, in the largest of sizes."""
    slow = dict.fromkeys(("p50_ms", "p99_ms", "max_ms", "mean_ms", "cpu_ms"), 54_988.7) | {"bytes": 25 << 20}
    rows = [*rows_of(phase(), 25 << 20, ABOUT)]
    rows.append(rows[0] | slow | {"deadline_hits": 99, "iters": 200})
    text = io.StringIO()
    Console(file=text, width=80).print(table.table("", rows, columns))
    assert "…" not in text.getvalue()
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert sum("tailbound" in line for line in lines) == 2
    assert sum(line.count("54989") for line in lines) == 4 + (columns is tail.COLUMNS)


def test_a_straggler_that_computes_in_steps_is_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match="give RANK:MS:EVERY, such as 1:40:160"):
        allreduce.run(LabSpec(2, straggler=Straggler(1, 40.0, None)))


@pytest.mark.parametrize("wrong", [{"iters": 0}, {"sizes": ()}, {"sizes": (4,)}])
def test_what_cannot_be_measured_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        allreduce.run(LabSpec(2), **wrong)


def test_a_start_line_ends_for_all_in_the_same_round(tmp_path: Path) -> None:
    path = tmp_path / "line"
    StartLine.create(path, 3)
    rounds: dict[int, int] = {}

    def run(rank: int) -> None:
        line, number = StartLine(path, rank, 3, timeout=20), 0
        while True:
            line.wait(last=number == 5)  # only rank 0 is heard
            if line.over:
                break
            number += 1
        rounds[rank] = number

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert rounds == {0: 5, 1: 5, 2: 5}
