"""``tailbound simulate --confirm``, short: the lab and the simulator do the same all-reduces."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tailbound_lab.simulate.confirm import run

pytestmark = [pytest.mark.needs("root", "netns", "bpf", "torch"), pytest.mark.timeout(240), pytest.mark.thorough]


@pytest.mark.usefixtures("warm_start")
def test_both_take_as_long_as_the_link_and_lose_little(tmp_path: Path) -> None:
    file = tmp_path / "confirm.json"
    rows = run(ranks=(2,), steps=3, json_file=file, console=Console(file=io.StringIO(), width=100))
    assert [row["trouble"] for row in rows] == ["calm", "1 % lost", "bursts"]
    assert file.exists()
    for row in rows:
        # 512 KiB of codes on each link at 200 Mbit/s, but for what two token buckets hold
        assert row["lab_p50_ms"] > 21 - 2 * 5
        assert row["simulated_p50_ms"] > 21 - 2 * 5
        assert row["simulated_lost"] < 0.2
