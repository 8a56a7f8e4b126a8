"""The benchmark of fan-out counts what was sent, and refuses to measure what did not arrive."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tailbound.errors import TailboundError
from tailbound_lab.bench import fanout

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

#: Float32 of which each of three owners has 80 rows: two bursts.
SIZE = 3 * 80 * 4 * fanout.WIDTH


def test_rows(tmp_path: Path) -> None:
    """System calls do not grow with the number of peers."""
    rows = fanout.run(tmp_path / "fanout.json", workers=(3,), size=SIZE, quick=True)
    assert json.loads((tmp_path / "fanout.json").read_text()) == rows
    assert [(row["name"], row["ports"], row["workers"], row["packets"], row["syscalls_per_op"]) for row in rows] == [
        (name, ports, 3, 160, calls) for ports in fanout.PORTS for name, calls in (("peers", 2), ("fanout", 1))
    ]
    assert all(row["cpu_ms_per_op"] > 0 for row in rows)


@pytest.mark.parametrize("ports", fanout.PORTS)
def test_refuses_to_lie(ports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that gets no copies is noticed."""
    monkeypatch.setattr(fanout, "_PATIENCE", 0.2)
    with ExitStack() as stack:
        bench = fanout.Bench(3, ports, SIZE, stack)
        assert bench.op("fanout").packets == 160
        bench._fanout.live({2})
        with pytest.raises(TailboundError, match="fanout: 80 of 160 packets arrived"):
            bench.op("fanout")
