"""``tailbound bench evidence``: commands that exist, in under two hours, and what is written of each."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tailbound.errors import ConfigError, TransportError
from tailbound_lab.bench import evidence
from tailbound_lab.bench.apart import compare
from tailbound_lab.bench.cli import bench
from tailbound_lab.bench.evidence import MEASUREMENTS, Measurement, run
from tailbound_lab.bench.measured import page
from tailbound_lab.simulate.cli import simulate


@pytest.mark.parametrize("measurement", MEASUREMENTS, ids=lambda each: each.name)
def test_every_command_can_be_given(measurement: Measurement, tmp_path: Path) -> None:
    verb, *arguments = measurement.arguments
    command = {"bench": bench, "simulate": simulate}[verb]
    if verb == "bench":
        command = bench.commands[arguments.pop(0)]
    command.make_context(verb, [*arguments, "--json", str(tmp_path / "rows.json")])


def test_all_of_it_takes_less_than_two_hours() -> None:
    assert sum(each.minutes for each in MEASUREMENTS) < 120
    assert len({each.name for each in MEASUREMENTS}) == len(MEASUREMENTS)


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    wrong, right = Measurement("wrong", ("bench", "nothing"), 1), Measurement("right", ("bench", "kernel", "--help"), 1)
    said = io.StringIO()
    with pytest.raises(TransportError, match="wrong did not end well"):
        run(tmp_path, measurements=(wrong, right), console=Console(file=said, width=200))
    first, second = json.loads((tmp_path / "measured.json").read_text())
    assert (first["ended"], second["ended"]) == ("with status 2", "well")
    assert second["command"] == "tailbound bench kernel --help"
    assert second["seconds"] > 0
    assert second["load_before"] >= 0
    assert "right: well" in said.getvalue()


def test_one_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    slow = Measurement("slow", ("bench", "kernel", "--help"), 0)
    with pytest.raises(TransportError, match="slow did not end well"):
        run(tmp_path, measurements=(slow,), console=Console(file=io.StringIO()))
    assert "given up" in (tmp_path / "measured.json").read_text()


def test_only_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose from error"):
        run(tmp_path, ("nothing",))


def measured_as(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """In place of a benchmark: each run writes the next of ``values``."""
    left = iter(values)

    def measured(each: Measurement, command: Sequence[str]) -> dict[str, Any]:
        rows = [{"name": "gloo", "bytes": 8, "p50_ms": 10.0, "nmse": None}, {"name": "ring", "p50_ms": next(left)}]
        Path(command[-1]).write_text(json.dumps(rows))
        return {key: value for key, value in ROW.items() if key not in ("name", "command")}

    monkeypatch.setattr(evidence, "_measured", measured)


ROW = {
    "name": "one", "command": "tailbound bench one", "commit": "0123456789ab", "machine": "M", "begun": "2026-01-01",
    "seconds": 2.0, "load_before": 0.5, "load_after": 1.0, "ended": "well",
}  # fmt: skip


@pytest.mark.parametrize(("second", "marked"), [(11.4, False), (8.6, True)])
def test_runs_are_compared_figure_by_figure(
    second: float, marked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_as(monkeypatch, [10.0, second])
    said = io.StringIO()
    run(tmp_path, repeat=2, measurements=(Measurement("one", (), 1),), console=Console(file=said, width=100))
    text = said.getvalue()
    assert ("! ring: p50_ms" in text) == marked
    assert f"{1 if marked else 2} of 2 agree" in text
    assert [row["name"] for row in json.loads((tmp_path / "measured.json").read_text())] == ["one", "one-2"]
    apart = json.loads((tmp_path / "apart.json").read_text())
    assert [(each["row"], each["values"]) for each in apart] == [
        ("gloo bytes=8", [10.0, 10.0]),
        ("ring", [10.0, second]),
    ]


def test_rows_are_the_same_by_what_they_are_of_and_not_by_their_place() -> None:
    first = [{"name": "a", "seed": 1, "p50_ms": 1.0}, {"name": "a", "seed": 2, "p50_ms": 3.0}]
    assert [each.by for each in compare([first, first[::-1]])] == [0.0, 0.0]
    assert [each.row for each in compare([first, first[:1]])] == ["a seed=1"]
    assert compare([first, [{"name": "a", "seed": 1, "p50_ms": 0.0}]]) == []


def test_what_was_measured_before_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Measurement("one", (), 1), Measurement("two", (), 1)
    measured_as(monkeypatch, [1.0, 2.0, 3.0])
    run(tmp_path, measurements=both, console=Console(file=io.StringIO()))
    rows = run(tmp_path, ("one",), measurements=both, console=Console(file=io.StringIO()))
    assert [row["name"] for row in rows] == ["one"]
    assert [row["name"] for row in json.loads((tmp_path / "measured.json").read_text())] == ["two", "one"]
    assert json.loads((tmp_path / "one.json").read_text())[1]["p50_ms"] == 3.0


def test_the_page_says_what_each_was_measured_on() -> None:
    line = page([ROW]).splitlines()[-1]
    assert line == "| one | `tailbound bench one` | 0123456789ab | M | 2026-01-01 | 2 s | 0.5, 1.0 | well |"


def test_the_page_is_that_of_what_was_written(repository: Path) -> None:
    docs = repository / "docs"
    assert (docs / "measured.md").read_text() == page(json.loads((docs / "measured.json").read_text())), "make generate"
