"""Benchmarks whose contenders cannot share a process: blocks, merged reports, and bytes of a link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailbound_lab.bench.link import link_bytes
from tailbound_lab.bench.meter import per_op
from tailbound_lab.bench.turns import blocks, in_turn, number_of

TABLE = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0
 data0: 4000000     300    0    0    0     0          0         0  1000000      90    0    0    0     0       0
"""


def test_iterations_are_dealt_into_a_few_blocks() -> None:
    assert blocks(50) == [13, 13, 12, 12]
    assert blocks(2) == [1, 1]


def test_contenders_take_turns_and_their_reports_are_told_apart() -> None:
    order = []

    def measure(path: str, iters: int) -> dict[int, list[dict[str, Any]]]:
        order.append(path)
        one = {"times": {"tailbound": [1.0] * iters}, "nmse": {"tailbound": []}, "expected": 10 * iters}
        one |= {"delivered": 9 * iters, "deadline_hits": 0, "link_bytes": 5 if path == "switch" else None}
        one |= {"spent": [["tailbound", 0.5 if path == "switch" else 0.25, 0.0, iters]]}
        return {64: [one, one]}

    ranks = in_turn({"tailbound": "switch", "transpose": "xdp"}, 6, measure)[64]
    assert order == ["switch", "xdp", "xdp", "switch", "switch", "xdp", "xdp", "switch"]
    assert [len(times) for times in ranks[0]["times"].values()] == [6, 6]
    assert number_of(ranks, "delivered", "transpose") == 108
    assert per_op(ranks[0]["spent"], "tailbound")["cpu_ms"] == pytest.approx(1e3 * 4 * 0.5 / 6)
    assert per_op(ranks[0]["spent"], "transpose")["cpu_ms"] == pytest.approx(1e3 * 4 * 0.25 / 6)
    assert number_of(ranks, "link_bytes", "tailbound") == 40
    assert number_of(ranks, "link_bytes", "transpose") is None


def test_bytes_of_a_link_are_those_of_both_ways(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    table.write_text(TABLE)
    assert link_bytes("data0", table) == 5_000_000
    assert link_bytes("data1", table) is None
