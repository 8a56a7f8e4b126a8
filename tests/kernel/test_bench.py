"""The kernel benchmark measures sums that were made, and says so."""

from __future__ import annotations

import json
from pathlib import Path

from tailbound_lab.bench import kernel

MUST = {"store", "add", "again-smaller", "refused", "result", "reflect"}
MUST |= {"again", "again-tagged", "refused-tagged", "corrupt", "forged"}
#: Rows in which every packet is summed.
SUMMING = ("store", "add", "again")


def test_rows(loader: str, tmp_path: Path) -> None:
    rows = kernel.run(tmp_path / "kernel.json", loaders=(loader,), quick=True)
    assert json.loads((tmp_path / "kernel.json").read_text()) == rows
    assert {row["name"] for row in rows} >= MUST
    for row in rows:
        assert row["loader"] == loader
        assert row["ns_median"] >= row["ns_per_packet"] > 0
        summing = row["name"].startswith(SUMMING)
        assert row["summed"] == (row["repeats"] if summing else 0), row["name"]
