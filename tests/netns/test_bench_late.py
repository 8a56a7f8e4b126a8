"""``tailbound bench late``, tiny: every way averages in a lab, one rank late."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tailbound_lab.bench.late import WAYS, run

pytestmark = [
    pytest.mark.needs("root", "netns", "bpf", "bcc", "headers", "torch", "matplotlib"), pytest.mark.timeout(240),
    pytest.mark.thorough,
]  # fmt: skip


@pytest.mark.usefixtures("warm_start")
def test_every_way_ends_after_the_late_rank_has_come_or_without_it(tmp_path: Path) -> None:
    file, said = tmp_path / "late.json", io.StringIO()
    console = Console(file=said, width=100)
    rows = run(workers=(2,), size=1 << 18, delays=(0.0, 20.0), iters=2, datapath="xdp", json_file=file, console=console)
    assert json.loads(file.read_text()) == rows
    assert [row["name"] for row in rows] == 2 * list(WAYS)
    for row in rows:
        assert 0 < row["others_p50_ms"] <= row["others_p99_ms"]
        if row["name"] != "bounded":
            assert row["others_p50_ms"] >= row["delay_ms"]
            assert row["delivered"] == 1.0
    assert "faster from a delay on" in said.getvalue()
    assert (tmp_path / "late.png").read_bytes().startswith(b"\x89PNG")
