"""``tailbound simulate --confirm``: what counts as near, and what is asked for; the lab is left out here."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tailbound import cli
from tailbound.errors import ConfigError
from tailbound_lab.lab.spec import LabSpec
from tailbound_lab.simulate import confirm
from tailbound_lab.simulate.confirm import TROUBLES, compared, simulated


def row_of(p50: float, p99: float, lost: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The lab's, of 100 and 200 ms and 1 % lost, and the simulator's."""
    lab = {
        "p50_ms": 100.0, "p99_ms": 200.0, "delivered": 0.99, "bytes": 1 << 19, "rate": 10**8, "iters": 20,
        "cpu_ms": 3.0,
    }  # fmt: skip
    return lab, {"p50_ms": p50, "p99_ms": p99, "rows_lost_percent": 100 * lost, "steps": 10}


@pytest.mark.parametrize(
    ("simulated_row", "near"),
    [
        ((100, 200, 0.01), (True, True, True)),
        ((114, 171, 0.0067), (True, True, True)),
        ((86, 169, 0.0066), (True, False, False)),
        ((116, 200, 0.0), (False, True, False)),
    ],
)
def test_near_is_15_percent_of_times_and_a_factor_of_one_and_a_half_of_losses(
    simulated_row: tuple[float, float, float], near: tuple[bool, bool, bool]
) -> None:
    row = compared(4, "calm", *row_of(*simulated_row))
    assert (row["p50_near"], row["p99_near"], row["lost_near"]) == near
    assert row["p50_ratio"] == pytest.approx(simulated_row[0] / 100)


def test_next_to_nothing_lost_is_nothing_lost() -> None:
    lab, sim = row_of(100, 200, 0.0)
    row = compared(4, "calm", lab | {"delivered": 0.9996}, sim)
    assert (row["lost_near"], row["lost_ratio"]) == (True, None)


def test_the_simulator_rests_and_loses_what_it_is_told_to() -> None:
    calm, lossy = (simulated(2, trouble, 10, 1) for trouble in TROUBLES[:2])
    bucket = 66_000 * 8 / confirm.rate_of(2) * 1e3
    assert calm["p50_ms"] >= 2 * (1 << 16) * 8 / confirm.rate_of(2) * 1e3 - bucket  # the link's time without a full one
    assert calm["rows_lost_percent"] == 0
    assert lossy["mb_rank"] > 1.005 * calm["mb_rank"]  # what was lost is asked for, and sent again


def test_every_case_is_run_in_both_and_a_table_says_what_is_not_near(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[LabSpec] = []

    def lab(spec: LabSpec, **settings: Any) -> list[dict[str, Any]]:
        asked.append(spec)
        assert (settings["datapath"], settings["iters"], settings["known"]) == ("udp", 2, True)
        assert settings["rest"] > 66_000 * 8 / (spec.rate or 0)
        return [row_of(0, 0, 0)[0]]

    monkeypatch.setattr(confirm.allreduce, "run", lab)
    monkeypatch.setattr(confirm, "simulated", lambda *_: row_of(100, 300, 0.01)[1])
    said, file = io.StringIO(), tmp_path / "confirm.json"
    rows = confirm.run(steps=2, json_file=file, console=Console(file=said, width=80))
    assert json.loads(file.read_text()) == rows
    assert [(spec.workers, spec.loss) for spec in asked] == [(n, loss) for n in (4, 8) for loss in (0.0, 0.01, 0.0)]
    assert [spec.rate for spec in asked] == 3 * [2 * 10**7] + 3 * [10**7]  # more ranks have slower links
    assert asked[2].background is not None
    assert "1.50!" in said.getvalue()
    assert "…" not in said.getvalue()
    with pytest.raises(ConfigError, match="16 ranks or fewer"):
        confirm.run(ranks=(64,))


def test_only_what_is_asked_for_is_given_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(confirm, "run", lambda **settings: seen.append(settings))
    assert cli.main(["simulate", "--confirm"]) == 0
    assert cli.main(["simulate", "--confirm", "-n", "4", "--steps", "5"]) == 0
    assert seen == [{"json_file": None}, {"json_file": None, "ranks": (4,), "steps": 5}]
