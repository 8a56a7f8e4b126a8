"""Benchmarks and the demo as they run in a lab, briefly: every one gives its rows, and they can be true."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tailbound.errors import ConfigError
from tailbound_lab.bench import allreduce, tail, train
from tailbound_lab.bench.train_plan import VARIANTS, plan
from tailbound_lab.lab.spec import LabSpec

# workers wait up to 120 s for each other and then say for whom: that has to come before the end of the test
pytestmark = [
    pytest.mark.needs("root", "netns", "bpf", "bcc", "headers", "torch"),
    pytest.mark.usefixtures("warm_start"),
    pytest.mark.timeout(240),
]
Rows = list[dict[str, Any]]


@pytest.fixture
def told(tmp_path: Path) -> Callable[..., tuple[Rows, str]]:
    """``(run, ...)`` -> the rows of a benchmark, which its file has, too, and all it says."""

    def call(run: Callable[..., Rows], *arguments: Any, **options: Any) -> tuple[Rows, str]:
        said, file = io.StringIO(), tmp_path / "out" / "rows.json"
        rows = run(*arguments, json_file=file, console=Console(file=said, width=120), **options)
        assert json.loads(file.read_text()) == rows
        for row in rows:
            assert row["cpu_ms"] > (row["kernel_ms"] or 0) >= 0  # a kernel may not tell its share
            if row["name"] == "tailbound":
                assert 0 < row["delivered"] <= 1
                assert row["datapath"] == options.get("datapath", "xdp")
        return rows, said.getvalue()

    return call


def test_all_reduces_are_measured_beside_gloo(told: Callable[..., tuple[Rows, str]]) -> None:
    names, sizes = ("tailbound", "gloo", "quantised"), (1 << 20, 4096)
    rows, _ = told(allreduce.run, LabSpec(2), sizes=sizes, iters=6, datapath="xdp", vs=names[1:])
    assert [(row["name"], row["bytes"]) for row in rows] == [(name, size) for size in sizes for name in names]
    for row in rows:
        assert row["iters"] == 6
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
        # deadlines are learned, from a few ops: a loaded machine may have one of six cut short, and not several
        cut = row["deadline_hits"] > 0
        assert row["nmse"] < (0.5 if cut else 2e-3)
        assert row["delivered"] > (0.5 if cut else 0.99)


@pytest.mark.parametrize(
    "envs", [("stopped",), pytest.param(("late", "tail1.5", "loss1"), marks=pytest.mark.thorough)], ids="+".join
)
def test_every_environment_of_the_tail_gives_rows(
    told: Callable[..., tuple[Rows, str]], envs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "_BLOCK_SECONDS", 2.0)
    monkeypatch.setattr(tail, "_STOP_AT", 0.5)
    rows, said = told(tail.run, workers=2, size=1 << 18, seconds=1.0, envs=envs)
    by = {(row["env"], row["name"]): row for row in rows}
    assert list(by) == [(env, name) for env in tail.ENVS if env in envs for name in ("tailbound", "gloo")]
    for row in rows:
        assert 0 < row["min_ms"] <= row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert row["min_ms"] <= row["mean_ms"] <= row["max_ms"]
    if "stopped" in envs:  # it holds Gloo for what is left of its second, whenever the iteration began
        assert by["stopped", "gloo"]["max_ms"] > 500
    else:
        assert by["late", "gloo"]["p50_ms"] > 200  # it waits for most of the quarter of a second that the rank is late
        assert by["tail1.5", "gloo"]["background"] == by["tail1.5", "tailbound"]["background"]
        assert by["loss1", "gloo"]["wire"]
    assert all(f"{env}: all-reduce" in said for env in envs)


def test_a_tail_that_cannot_be_measured_is_refused() -> None:
    for wrong in ({"workers": 1}, {"size": 4}, {"envs": ("storm",)}, {"seconds": 0.0}):
        with pytest.raises(ConfigError, match="environments"):
            tail.run(**wrong)  # type: ignore[arg-type]


BOTH = ("gloo", "tailbound")
SHORT = {"workers": 2, "batch": 32, "turn": 2, "losses": (0.0,), "seeds": (1,)}


@pytest.mark.needs("sklearn")
@pytest.mark.parametrize(
    ("settings", "names", "steps", "complete"),
    [
        pytest.param(SHORT | {"steps": 6, "seconds": 1e-6, "variants": BOTH}, BOTH, 2, False, id="until time is over"),
        pytest.param(SHORT | {"steps": 4, "variants": VARIANTS}, VARIANTS, 4, True, marks=pytest.mark.thorough),
    ],
)
def test_variants_train_in_turn(
    told: Callable[..., tuple[Rows, str]],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    names: tuple[str, ...],
    steps: int,
    complete: bool,
) -> None:
    monkeypatch.setenv("TAILBOUND_DEADLINE_MS", "2000,2000")  # of four steps one that is cut short would show
    rows, said = told(train.run, plan(["accuracy"], **settings), datapath="xdp")
    assert [(row["name"], row["steps"], row["complete"]) for row in rows] == [(n, steps, complete) for n in names]
    gloo, accuracies = rows[0], {row["name"]: row["accuracy"] for row in rows}
    for row in rows:
        assert 0 < row["step_p50_ms"] <= row["step_p99_ms"]
        assert len(row["curve"]["accuracy"]) == steps // 2 + 1  # before and after each turn
        assert row["curve"]["accuracy"][0] == gloo["curve"]["accuracy"][0]  # the same weights
        assert row["gradient_bytes"] == gloo["gradient_bytes"]
    for name in {"fp16", "tailbound"} & set(names):  # all averages lead to about the same place
        assert abs(accuracies[name] - accuracies["gloo"]) < 0.1
    assert "accuracy: 2 workers" in said


@pytest.mark.thorough
def test_a_gpt_trains_under_bursts_and_times_to_gloos_loss_are_told(told: Callable[..., tuple[Rows, str]]) -> None:
    settings = {"workers": 2, "steps": 6, "turn": 3, "seeds": (1,), "tails": (2.0,), "calibration": 4.0}
    rows, said = told(train.run, plan(["tails-gpt"], **settings, variants=BOTH), datapath="udp")
    assert [(row["name"], row["tail"], row["complete"]) for row in rows] == [(name, 2.0, True) for name in BOTH]
    gloo, ours = rows
    assert gloo["background"] == ours["background"] is not None
    assert ours["step_loss"][0] == pytest.approx(gloo["step_loss"][0], rel=1e-5)  # the same weights and text
    assert ours["step_loss"][-1] < ours["step_loss"][0]
    assert "time to Gloo's loss" in said


@pytest.mark.needs("sklearn", "matplotlib")
def test_the_demo_sums_in_the_kernel_and_accounts_for_every_packet(tmp_path: Path) -> None:
    from tailbound_lab.demo.run import Length, run

    text, out = io.StringIO(), tmp_path / "demo"
    run(out=out, datapath="xdp", workers=2, length=Length(1, 0.0), console=Console(file=text, width=120))
    summary = json.loads((out / "summary.json").read_text())
    # the time is over after one turn of each
    assert (summary["datapath"], summary["steps"], summary["stopped_by_time"]) == ("xdp", 11, True)
    assert summary["rows_summed_in_kernel"] > 0
    assert summary["ledger"]["lost_on_purpose"] > 0
    assert (summary["ledger"]["difference"], summary["ledger_balanced"]) == (0, True), summary["ledger"]
    assert 0 < summary["delivered"] <= 1
    for who in ("", "gloo_"):
        assert summary[f"{who}accuracy"] > 0.5
        assert 25 <= summary[f"{who}iter_p50_ms"] <= summary[f"{who}iter_p99_ms"]
    assert "every packet accounted for" in text.getvalue()
    picture = (out / "demo.png").read_bytes()
    assert (picture[:4], struct.unpack(">2I", picture[16:24])) == (b"\x89PNG", (1760, 864))
