"""The kernel benchmark measures sums that were made, and says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailbound.errors import TailboundError
from tailbound.wire.schema import PacketType, Verdict
from tailbound_lab.bench import kernel

MUST = {"store", "add", "add-shifted", "refused", "result", "contended", "reflect"}
MUST |= {"again", "again-tagged", "refused-tagged", "corrupt", "forged"}
#: Rows in which every packet is summed.
SUMMING = ("store", "contended", "add", "again")


def test_rows(loader: str, tmp_path: Path) -> None:
    rows = kernel.run(tmp_path / "kernel.json", loaders=(loader,), quick=True)
    assert json.loads((tmp_path / "kernel.json").read_text()) == rows
    assert {row["name"] for row in rows} >= MUST
    for row in rows:
        assert row["loader"] == loader
        assert row["ns_median"] >= row["ns_per_packet"] > 0
        summing = row["name"].startswith(SUMMING)
        assert row["summed"] == (row["repeats"] if summing else 0), row["name"]


def test_refuses_to_lie(loader: str) -> None:
    """A packet that is repeated as it is is not summed: asked to count that as sums, the benchmark fails."""
    bench = kernel.Bench(loader)
    case = kernel.Case("wrong", PacketType.CONTRIBUTION, 0, (Verdict.STORED, Verdict.ADDED))
    try:
        with pytest.raises(TailboundError, match=r"0 of 100 packets.*DUPLICATE"):
            bench.run(case, 100)
    finally:
        bench.close()
