"""What whole jobs over udp leave to look at: traces and status. Their books: ``sim/test_watch.py``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from support import MS, gradients, patient, team
from tailbound.observe import status

NUMEL = 8 * 64 * 256
#: Nothing is repaired and rows stay where they are, so that every lost packet shows once, and where it was lost.
PLAIN: dict[str, Any] = {"repair": False, "share_rows": False, "quiet": 50 * MS}


def test_a_trace_is_left_at_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAILBOUND_TRACE", str(tmp_path / "traces"))
    with team(2, patient(**PLAIN | {"quiet": 2000 * MS})) as job:
        for op in range(4):
            job.allreduce(gradients("U", 2, NUMEL, seed=op))
        assert job[0].trace(tmp_path / "now.json").exists()
    files = sorted((tmp_path / "traces").iterdir())
    assert [f.name.rpartition("-")[2] for f in files] == ["rank0.json", "rank1.json"]
    for rank, file in enumerate(files):
        events = json.loads(file.read_text())["traceEvents"]
        spans = [e for e in events if e["ph"] == "X"]
        assert {e["pid"] for e in spans} == {rank}
        by_stage = {name: [e for e in spans if e["cat"] == name] for name in {e["cat"] for e in spans}}
        assert {name: len(found) for name, found in by_stage.items()} == dict.fromkeys(
            ("op", "queue", "agree", "encode", "send", "wait for contributions", "average and publish",
             "wait for results", "decode"), 4,
        )  # fmt: skip
        for whole in by_stage["op"]:
            inside = [e for e in spans if e["name"].split()[-1] == whole["name"].split()[-1]]
            assert all(e["dur"] >= 0 for e in inside)
            assert max(e["ts"] + e["dur"] for e in inside) <= whole["ts"] + whole["dur"] + 0.001


def test_a_status_is_there_while_the_job_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAILBOUND_STATUS", str(tmp_path))
    monkeypatch.setattr(status, "PERIOD", 0.05)
    with team(2, patient(**PLAIN)) as job:
        for op in range(3):
            job.allreduce(gradients("U", 2, NUMEL, seed=op))
        until = time.monotonic() + 30
        found: list[dict[str, Any]] = []
        while [s["ops"] for s in found] != [3, 3]:
            assert time.monotonic() < until
            found = status.read([tmp_path])
        assert [(s["rank"], s["pid"], s["delivered"]) for s in found] == [(0, os.getpid(), 1.0), (1, os.getpid(), 1.0)]
    assert list(tmp_path.iterdir()) == []
