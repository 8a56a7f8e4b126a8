"""``tailbound bench tail`` in a lab, briefly: every environment gives its rows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tailbound.errors import ConfigError
from tailbound_lab.bench.channel import GLOO, OURS
from tailbound_lab.bench.tail import ENVS, run

# workers wait up to 120 s for each other and then say for whom: that has to come before the end of the test
BOTH = [OURS, GLOO]
pytestmark = [pytest.mark.needs("root", "netns", "bpf", "bcc", "headers", "torch"), pytest.mark.timeout(240)]


@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize(
    "envs", [("stopped",), pytest.param(("late", "tail1.5", "loss1"), marks=pytest.mark.thorough)], ids="+".join
)
def test_every_environment_gives_rows(tmp_path: Path, envs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailbound_lab.bench.tail._BLOCK_SECONDS", 2.0)
    monkeypatch.setattr("tailbound_lab.bench.tail._STOP_AT", 0.5)
    said = io.StringIO()
    file = tmp_path / "out" / "tail.json"
    rows = run(workers=2, size=1 << 18, seconds=1.0, envs=envs, json_file=file, console=Console(file=said, width=100))
    assert json.loads(file.read_text()) == rows
    assert [(row["env"], row["name"]) for row in rows] == [(env, name) for env in ENVS if env in envs for name in BOTH]
    for row in rows:
        assert row["iters"] >= 1
        assert 0 < row["min_ms"] <= row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert row["min_ms"] <= row["mean_ms"] <= row["max_ms"]
        assert row["bytes"] == 1 << 18
        assert row["workers"] == 2
        assert row["cpu_ms"] > (row["kernel_ms"] or 0) >= 0  # a kernel may not tell its share
        if row["name"] == "tailbound":
            assert row["datapath"] == "xdp"
            assert 0 < row["delivered"] <= 1
    by = {(row["env"], row["name"]): row for row in rows}
    if "stopped" in envs:  # it holds Gloo for what is left of its second, whenever the iteration began
        assert by["stopped", "gloo"]["max_ms"] > 500
    else:
        assert by["late", "gloo"]["p50_ms"] > 200  # it waits for most of the quarter of a second that the rank is late
        assert by["tail1.5", "gloo"]["background"] == by["tail1.5", "tailbound"]["background"]
        assert by["loss1", "gloo"]["wire"]
    assert all(f"{env}: all-reduce" in said.getvalue() for env in envs)


def test_what_cannot_be_is_refused() -> None:
    for wrong in ({"workers": 1}, {"size": 4}, {"envs": ("storm",)}, {"seconds": 0.0}):
        with pytest.raises(ConfigError, match="environments"):
            run(**wrong)  # type: ignore[arg-type]
