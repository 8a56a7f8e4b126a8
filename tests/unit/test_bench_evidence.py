"""``tailbound bench evidence``: commands that exist, in under two hours, and what is written of each."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tailbound.bench.cli import bench
from tailbound.bench.evidence import MEASUREMENTS, Measurement, run
from tailbound.errors import ConfigError, TransportError
from tailbound.simulate.cli import simulate


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
    assert second["command"] == f"tailbound bench kernel --help --json {tmp_path / 'right.json'}"
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
