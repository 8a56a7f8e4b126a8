"""``tailbound bench profile`` in a lab: parts of real ops, of all ranks."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tailbound_lab.bench.profile import PARTS, run
from tailbound_lab.lab.spec import LabSpec

# workers wait up to 120 s for each other and then say for whom: that has to come before the end of the test
pytestmark = [pytest.mark.needs("torch"), pytest.mark.timeout(240)]

#: ms: nanoseconds are whole, and medians of them may end in a half.
_EXACT = 1e-5


def check(rows: list[dict[str, Any]]) -> None:
    """What holds however fast the machine is and whoever else uses it."""
    for row in rows:
        parts = [row[f"{name}_ms"] for name in PARTS]
        assert all(part >= 0 for part in parts), row
        assert min(row[name] for name in ("codec_ms", "interpreter_ms", "xdp_program_ms", "unstamped_ms")) > 0, row
        assert sum(parts) + row["rest_ms"] == pytest.approx(row["op_ms"], abs=_EXACT)


@pytest.mark.usefixtures("warm_start")
@pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")
def test_every_rank_has_its_parts_and_they_add_up(tmp_path: Path) -> None:
    said, file = io.StringIO(), tmp_path / "profile.json"
    before = Path("/proc/sys/kernel/bpf_stats_enabled").read_text()
    rows = run(
        LabSpec(2), sizes=(1 << 20, 4096), iters=4, datapath="xdp", json_file=file, console=Console(file=said, width=80)
    )
    assert json.loads(file.read_text()) == rows
    assert [(row["bytes"], row["rank"], row["workers"], row["iters"], row["datapath"]) for row in rows] == [
        (size, rank, 2, 4, "xdp") for size in (1 << 20, 4096) for rank in range(2)
    ]
    check(rows)
    for row in rows:
        assert {"send_many", "wait"} <= set(row["functions"])
    assert "…" not in said.getvalue()
    assert Path("/proc/sys/kernel/bpf_stats_enabled").read_text() == before
