"""Whole jobs over udp: the books balance, and what jobs leave to look at. Losses counted: ``sim/test_watch.py``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import MS, Team, Trouble, balanced, gradients, patient, team
from tailbound.observe import status
from tailbound.wire.schema import UNKNOWN_SENDER, PacketType, Verdict

NUMEL = 8 * 64 * 256
#: Nothing is repaired and rows stay where they are, so that every lost packet shows once, and where it was lost.
PLAIN: dict[str, Any] = {"repair": False, "share_rows": False, "quiet": 50 * MS}


def books(job: Team, stage: str) -> dict[tuple[int, int], dict[str, int]]:
    """Entries by (who counts, whose rows)."""
    return {
        (rank, int(peer)): entry
        for rank, member in enumerate(job.communicators)
        for peer, entry in member.stats()["ledger"][stage].items()
    }


def check(job: Team) -> None:
    """The books balance, and those of contributions agree with what the datapath has summed."""
    for member in job.communicators:
        stats = member.stats()
        for stage in stats["ledger"].values():
            assert all(balanced(entry) for entry in stage.values())
        assert stats["rows_summed"] == sum(e["taken"] for e in stats["ledger"]["contributions"].values())
        json.dumps(stats)


def test_without_trouble_everything_is_taken() -> None:
    with team(3, patient(**PLAIN | {"quiet": 2000 * MS})) as job:
        for op in range(5):
            job.allreduce(gradients("U", 3, NUMEL, seed=op))
        check(job)
        for stage in ("contributions", "results"):
            for entry in books(job, stage).values():
                assert entry["ops"] == 5
                assert entry["expected"] == entry["taken"] > 0
        assert job[0].stats()["event_counts"] == {"results_by": 1}  # how they leave is told once


def test_frames_in_pieces_are_told_with_a_remedy(caplog: pytest.LogCaptureFixture) -> None:
    """What the kernel's program counts as NOT_LINEAR is never lost in silence; only a rising count is told again."""
    with team(2, patient(**PLAIN | {"quiet": 2000 * MS})) as job:
        job.allreduce(gradients("U", 2, NUMEL, seed=0))
        job[0].job.store.ledger["verdict"][UNKNOWN_SENDER, Verdict.NOT_LINEAR] += np.uint64(7)
        for op in range(3):
            for _, outcome in job.allreduce(gradients("U", 2, NUMEL, seed=op)):
                assert outcome.error is None  # other rows come
        assert job[0].stats()["event_counts"]["not_linear"] == 1
        assert "not_linear" not in job[1].stats()["event_counts"]
    (line,) = (r.getMessage() for r in caplog.records if "NOT_LINEAR" in r.getMessage())
    assert "7 frames" in line
    assert "TAILBOUND_MTU" in line


def test_duplicates_are_booked_apart() -> None:
    with team(2, patient(**PLAIN | {"quiet": 2000 * MS})) as job:
        troubles = [Trouble(3, duplicate=0.05).attach(member) for member in job.communicators]
        for op in range(4):
            job.allreduce(gradients("U", 2, NUMEL, seed=op))
        check(job)
        entries = [*books(job, "contributions").values(), *books(job, "results").values()]
        assert all(entry["expected"] == entry["taken"] for entry in entries)
        assert 0 < sum(entry["duplicated"] for entry in entries) <= sum(t.doubled for t in troubles)


def test_repaired_rows_are_taken_and_counted() -> None:
    with team(3, patient(share_rows=False, quiet=20 * MS)) as job:
        for member in job.communicators:
            Trouble(5, loss=0.02, types=frozenset({PacketType.RESULT})).attach(member)
        for op in range(6):
            job.allreduce(gradients("U", 3, NUMEL, seed=op))
        check(job)
        assert sum(entry["repaired"] for entry in books(job, "results").values()) > 10


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
