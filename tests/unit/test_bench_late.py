"""Rows of ``tailbound bench late``, and where ways break even."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tailbound.errors import ConfigError
from tailbound.transport.overtime import MOST
from tailbound_lab.bench.late import (
    BOUNDED,
    STRICT,
    WAYS,
    breaks,
    breaks_table,
    crossing,
    run,
    summarize,
    table,
    warm_ups,
)

MS = 1_000_000
ABOUT = {"transfer_ms": 10.0, "rate": 10**9}


def report(ends: dict[str, int], delivered: int = 100) -> dict[str, Any]:
    return {
        "ends": {name: [ends.get(name, 50) * MS] * 3 for name in WAYS},
        "rows": {STRICT: [100, 100], BOUNDED: [100, delivered]},
        "datapath": "xdp",
    }


def rows_of(delay: float, **others: int) -> list[dict[str, Any]]:
    ranks = [report(others), report(others | {"bounded": 30}), report({BOUNDED: 90}, delivered=70)]
    return summarize(4096, delay, ranks, ABOUT)


def test_the_late_rank_itself_does_not_count_among_the_others() -> None:
    rows = {row["name"]: row for row in rows_of(2.0, ring=60, bounded=40)}
    assert list(rows) == list(WAYS)
    assert (rows[BOUNDED]["others_p50_ms"], rows[BOUNDED]["all_p50_ms"]) == (40, 90)
    assert (rows["ring"]["others_p50_ms"], rows["ring"]["all_p50_ms"]) == (60, 60)
    assert (rows[BOUNDED]["delivered"], rows[STRICT]["delivered"], rows["gloo"]["delivered"]) == (0.9, 1.0, 1.0)
    assert (rows[BOUNDED]["datapath"], rows["stragglar"]["datapath"]) == ("xdp", "tcp")
    assert {(row["delay_ms"], row["workers"], row["iters"]) for row in rows.values()} == {(20.0, 3, 3)}


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [
        ([1, 1, 1], [2, 2, 2], 0.0),  # always
        ([3, 3, 3], [2, 2, 2], None),  # never
        ([3, 3, 3], [1, 5, 5], 0.5),  # between the first two
        ([3, 3, 3], [2, 3, 5], 1.0),  # equal is not less
        ([3, 3, 3], [5, 2, 4], 1.5),  # what it gained before does not count
        ([3, 3, 3], [5, 5, 3], None),
    ],
)
def test_where_two_lines_cross_for_good(one: list[float], other: list[float], at: float | None) -> None:
    assert crossing([0.0, 1.0, 2.0], one, other) == at


def test_what_may_be_waited_past_deadlines_is_used_up_before_it_counts() -> None:
    """An engine that has only just begun to be late waits for half a second more than its deadlines say."""
    for delay in (17.0, 67.0, 268.0, 1208.0):
        assert 6 <= warm_ups(BOUNDED, delay) <= 40
        assert warm_ups(BOUNDED, delay) == 40 or delay * warm_ups(BOUNDED, delay) > MOST / MS
    assert warm_ups(STRICT, 268.0) == warm_ups(BOUNDED, 0.0) == 1


def test_the_tables_fit_a_terminal() -> None:
    rows = rows_of(0.0, stragglar=80, ring=60) + rows_of(4.0, stragglar=90, ring=120)
    found = {(each["faster"], each["than"]): each["from"] for each in breaks(rows)}
    assert found["stragglar", "ring"] == 1.6
    assert found["stragglar", "gloo"] is None
    said = io.StringIO()
    console = Console(file=said, width=80)
    console.print(table(rows))
    console.print(breaks_table(breaks(rows)))
    assert "…" not in said.getvalue()
    assert "nowhere" in said.getvalue()
    assert "1.60" in said.getvalue()


@pytest.mark.parametrize(
    "wrong", [{"workers": (1,)}, {"delays": (-1.0,)}, {"delays": (100.0,)}, {"iters": 1}, {"size": 64}, {"workers": ()}]
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        run(**wrong)


@pytest.mark.needs("matplotlib")
def test_the_picture_has_a_panel_for_every_number_of_ranks(tmp_path: Path) -> None:
    from tailbound_lab.bench.late_plot import draw

    rows = rows_of(0.0) + rows_of(1.0)
    draw([*rows, *(row | {"workers": 8} for row in rows)], tmp_path / "late.png")
    assert (tmp_path / "late.png").read_bytes().startswith(b"\x89PNG")
