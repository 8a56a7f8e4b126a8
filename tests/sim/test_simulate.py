"""``tailbound simulate``: ports, layouts, and the engine of a few ranks behind them."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tailbound import cli
from tailbound_lab.simulate.layouts import arrange
from tailbound_lab.simulate.ports import Port, Switching
from tailbound_lab.simulate.run import Wanted, bound, simulate
from tailbound_lab.simulate.steps import Team

GBIT = 10**9
ENTRIES = 1 << 16


def test_a_port_drops_what_does_not_fit_and_marks_above_its_threshold() -> None:
    """A byte a ns; the packet that leaves counts as waiting."""
    port = Port(1e9, buffer=3000, mark=1500)
    assert [port.take(1000, 0) for _ in range(4)] == [1000, 2000, 3000, 0]
    assert (port.marks, port.most, port.backlog(500)) == (2, 3000, 2500)
    assert port.take(1000, 1500) == 4000
    assert port.take(1000, 9000) == 10_000


def test_a_port_makes_up_for_a_pause_by_its_credit_and_no_more() -> None:
    port = Port(1e9, buffer=1e9, credit=1500)
    assert [port.take(1000, 10_000) for _ in range(3)] == [10_000, 10_500, 11_500]


def test_everybody_of_two_dimensions_is_in_a_group_and_in_a_job_across() -> None:
    arranged = arrange("2d", 12, ENTRIES)
    assert arranged.places[:4] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert arranged.places[4:] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    for rank, parts in enumerate(arranged.parts):
        assert [arranged.places[part.job][part.rank] for part in parts] == [rank, rank]
    shards = sorted({(parts[1].begin, parts[1].entries) for parts in arranged.parts})
    size = -(-ENTRIES // 48) * 16  # a third, in steps of 16 entries
    assert shards == [(k * size, size) for k in range(3)]


def test_a_calm_step_takes_what_its_bytes_take_and_the_same_seed_gives_the_same() -> None:
    """Headers are 8 % of a row of 1376 codes, and a few round trips and turns come on top."""
    wanted = Wanted(size=4 * ENTRIES, switching=Switching(rate=GBIT // 4), steps=3, warm=2)
    (_, steps, *_), least = simulate(4, wanted), bound(wanted.arrangement(4), GBIT // 4)
    assert least == pytest.approx(2 * 0.75 * ENTRIES * 8 / (GBIT // 4))
    assert all(step.delivered == step.expected > 0 for step in steps)
    assert all(1.08 * least < step.slowest / 1e9 < 1.25 * least for step in steps)
    assert not any(step.dropped for step in steps)
    assert simulate(4, wanted)[1] == steps
    assert simulate(4, replace(wanted, seed=2))[1] != steps


def test_the_mean_of_two_dimensions_is_that_of_all_ranks() -> None:
    with contextlib.closing(Team(arrange("2d", 4, ENTRIES), Switching(), seed=1)) as team:
        team.step()
        exact = np.mean([team.data(rank) for rank in range(4)], axis=0, dtype=np.float64)
        for rank in range(4):
            begin = team.arrangement.parts[rank][1].begin
            wanted = exact[begin : begin + ENTRIES // 2]
            error = team.result(rank) - wanted
            assert error @ error < 3e-3 * (wanted @ wanted)  # coded twice


def test_the_command_prints_a_table_and_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    words = ["simulate", "-n", "2", "-n", "4", "--size", "64KiB", "--steps", "2", "--warm", "1", "--json", str(file)]
    assert cli.main(words) == 0
    assert "msgs" in capsys.readouterr().out
    rows = json.loads(file.read_text())
    assert [row["ranks"] for row in rows] == [2, 4]
    assert all(len(row["about"]["step_ms"]) == 2 for row in rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "5000"], "4096"),
        (["--ranks", "300"], "take --layout 2d"),
        (["--ranks", "13", "--layout", "2d"], "not prime"),
        (["--ranks", "514", "--layout", "2d"], "give other --ranks"),
        (["--rate", "fast"], "write for example 1gbit"),
        (["--port-buffer", "much"], "write for example"),
        (["--tail", "0.5"], "x>=1"),
        (["--straggler-ms", "-1"], "x>=0"),
        (["--json", "/proc/no/file"], "cannot be written"),
    ],
)
def test_wrong_arguments_are_said_before_anything_runs(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *words]) == 2
    assert said in capsys.readouterr().err
