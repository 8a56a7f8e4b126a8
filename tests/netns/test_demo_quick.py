"""A very short demo and benchmark in the lab, over the kernel."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import pytest
from rich.console import Console

from tailbound_lab.bench import allreduce
from tailbound_lab.lab.spec import LabSpec

# workers wait up to 120 s for each other and then say for whom: that has to come before the end of the test
pytestmark = [pytest.mark.needs("root", "netns", "bpf", "bcc", "headers", "torch"), pytest.mark.timeout(240)]


@pytest.mark.usefixtures("warm_start")
@pytest.mark.needs("sklearn", "matplotlib")
def test_the_demo_sums_in_the_kernel_and_accounts_for_every_packet(tmp_path: Path) -> None:
    from tailbound_lab.demo.run import Length, run

    text = io.StringIO()
    out = tmp_path / "demo"
    run(out=out, datapath="xdp", workers=2, length=Length(1, 0.0), console=Console(file=text, width=120))
    summary = json.loads((out / "summary.json").read_text())
    # the time is over after one turn of each
    assert (summary["datapath"], summary["steps"]) == ("xdp", 11)
    assert summary["stopped_by_time"] is True
    assert summary["rows_summed_in_kernel"] > 0
    assert summary["ledger"]["lost_on_purpose"] > 0
    assert summary["ledger"]["difference"] == 0, summary["ledger"]
    assert summary["ledger_balanced"] is True
    assert 0 < summary["delivered"] <= 1
    assert summary["accuracy"] > 0.5
    assert summary["gloo_accuracy"] > 0.5
    assert 25 <= summary["iter_p50_ms"] <= summary["iter_p99_ms"]
    assert 25 <= summary["gloo_iter_p50_ms"] <= summary["gloo_iter_p99_ms"]
    assert "every packet accounted for" in text.getvalue()
    picture = (out / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">2I", picture[16:24]) == (1760, 864)


@pytest.mark.usefixtures("warm_start")
def test_the_benchmark_measures_both(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    spec = LabSpec(2)
    allreduce.run(
        spec, sizes=(1 << 20, 4096), iters=6, datapath="xdp", json_file=file, console=Console(file=io.StringIO()),
        vs=("gloo", "quantised"),
    )  # fmt: skip
    rows = json.loads(file.read_text())
    assert [(r["name"], r["bytes"], r["datapath"]) for r in rows] == [
        (name, size, "xdp" if name == "tailbound" else "tcp")
        for size in (1 << 20, 4096) for name in ("tailbound", "gloo", "quantised")
    ]  # fmt: skip
    for row in rows:
        assert row["iters"] == 6
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert row["cpu_ms"] > (row["kernel_ms"] or 0) >= 0  # a kernel may not tell its share
        # deadlines are learned, from a few ops: a loaded machine may have one of six cut short, and not several
        cut = row["deadline_hits"] > 0
        assert row["nmse"] < (0.5 if cut else 2e-3)
        assert row["delivered"] > (0.5 if cut else 0.99)
