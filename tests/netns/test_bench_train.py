"""``tailbound bench train``, tiny: every variant trains in a lab."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tailbound_lab.bench.train import run
from tailbound_lab.bench.train_plan import VARIANTS, plan

# workers wait up to 120 s for each other and then say for whom: that has to come before the end of the test
pytestmark = [pytest.mark.needs("torch", "sklearn"), pytest.mark.timeout(240)]


@pytest.mark.usefixtures("warm_start")
@pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")
def test_ours_and_gloo_train_in_turn_until_the_time_is_over(tmp_path: Path) -> None:
    """As short as it can be: the time is over after the first turn of each."""
    said, file = io.StringIO(), tmp_path / "train.json"
    chosen = plan(
        ["accuracy"], workers=2, batch=32, steps=6, turn=2, losses=(0.0,), seeds=(1,), seconds=1e-6,
        variants=("gloo", "tailbound"),
    )  # fmt: skip
    rows = run(chosen, datapath="xdp", json_file=file, console=Console(file=said, width=120))
    assert json.loads(file.read_text()) == rows
    assert [(row["name"], row["steps"], row["complete"]) for row in rows] == [
        ("gloo", 2, False), ("tailbound", 2, False),
    ]  # fmt: skip
    gloo, ours = rows
    assert all(row["cpu_ms"] > (row["kernel_ms"] or 0) >= 0 for row in rows)
    assert (ours["datapath"], ours["gradient_bytes"]) == ("xdp", gloo["gradient_bytes"])
    assert 0 < ours["delivered"] <= 1
    assert ours["curve"]["accuracy"][0] == gloo["curve"]["accuracy"][0]  # the same weights
    assert abs(ours["accuracy"] - gloo["accuracy"]) < 0.1


@pytest.mark.thorough
@pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")
def test_all_variants_train_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILBOUND_DEADLINE_MS", "2000,2000")  # of four steps one that is cut short would show
    said = io.StringIO()
    file = tmp_path / "out" / "train.json"
    # two turns of two steps, a look before and after each
    chosen = plan(["accuracy"], workers=2, batch=32, steps=4, turn=2, losses=(0.0,), seeds=(1,), variants=VARIANTS)
    rows = run(chosen, datapath="xdp", json_file=file, console=Console(file=said, width=120))
    assert json.loads(file.read_text()) == rows
    assert [row["name"] for row in rows] == list(VARIANTS)
    by = {row["name"]: row for row in rows}
    for row in rows:
        assert (row["workers"], row["steps"], row["complete"]) == (2, 4, True)
        assert 0 < row["step_p50_ms"] <= row["step_p99_ms"]
        assert row["steps_per_s"] > 0
        assert len(row["curve"]["accuracy"]) == 3
        assert row["curve"]["accuracy"][0] == rows[0]["curve"]["accuracy"][0]  # the same weights
        assert row["gradient_bytes"] == by["gloo"]["gradient_bytes"]
    assert by["tailbound"]["datapath"] == "xdp"
    assert by["tailbound"]["delivered"] > 0.9
    # all averages lead to about the same place
    for name in ("fp16", "tailbound"):
        assert abs(by[name]["accuracy"] - by["gloo"]["accuracy"]) < 0.1
    assert "accuracy: 2 workers" in said.getvalue()


@pytest.mark.thorough
@pytest.mark.needs("root", "netns")
def test_a_gpt_trains_under_bursts_and_times_to_gloos_loss_are_told(tmp_path: Path) -> None:
    said, file = io.StringIO(), tmp_path / "tails.json"
    chosen = plan(
        ["tails-gpt"], workers=2, steps=6, turn=3, seeds=(1,), tails=(2.0,), calibration=4.0,
        variants=("gloo", "tailbound"),
    )  # fmt: skip
    rows = run(chosen, datapath="udp", json_file=file, console=Console(file=said, width=120))
    assert json.loads(file.read_text()) == rows
    assert [(row["name"], row["tail"], row["complete"]) for row in rows] == [
        ("gloo", 2.0, True), ("tailbound", 2.0, True),
    ]  # fmt: skip
    gloo, ours = rows
    assert gloo["background"] == ours["background"] is not None
    assert ours["step_loss"][0] == pytest.approx(gloo["step_loss"][0], rel=1e-5)  # the same weights and text
    assert ours["step_loss"][-1] < ours["step_loss"][0]
    assert "time to Gloo's loss" in said.getvalue()
