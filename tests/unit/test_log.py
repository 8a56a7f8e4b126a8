"""Structured events: kept, counted, thinned out in the log."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pytest

import tailbound
from tailbound.observe.events import LINES, PERIOD, Events


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def test_an_event_is_kept_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    events = Events(3, Clock())
    with caplog.at_level(logging.INFO, "tailbound"):
        events.emit("suspect", suspect=1, stage="results")
        events.emit("map", "a new map", level=logging.INFO, id=7)
    assert [r.getMessage() for r in caplog.records] == ["rank 3: suspect suspect=1 stage=results", "rank 3: a new map"]
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    assert caplog.records[1].tailbound == {"event": "map", "id": 7}
    assert [(e.name, e.fields) for e in events.recent()] == [
        ("suspect", {"suspect": 1, "stage": "results"}), ("map", {"id": 7}),
    ]  # fmt: skip
    assert events.counts == {"suspect": 1, "map": 1}


def test_a_flood_is_thinned_out_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    events = Events(0, clock, keep=16)
    with caplog.at_level(logging.WARNING, "tailbound"):
        for i in range(100):
            events.emit("loss", op=i)
        events.emit("other")
        assert len(caplog.records) == LINES + 1
        clock.now += PERIOD
        events.emit("loss", op=100)
    assert caplog.records[-1].getMessage().endswith(f"({100 - LINES} more like it were not logged)")
    assert events.counts["loss"] == 101
    assert [e.fields.get("op") for e in events.recent(3)] == [99, None, 100]
    assert len(events.recent()) == 16 + 1


def test_a_flood_displaces_no_other_event() -> None:
    events = Events(0, Clock())
    events.emit("rank_died", died=2)
    events.emit("suspect", suspect=1)
    for i in range(10_000):
        events.emit("loss", op=i)
        events.emit("skipped", op=i)
    names = [e.name for e in events.recent(64)]
    assert names[:2] == ["rank_died", "suspect"]
    assert len(names) == 64
    assert names.count("loss") == names.count("skipped") == 31
    assert [e.fields["op"] for e in events.recent(8)[-2:]] == [9999, 9999]
    assert events.counts["loss"] == 10_000


def test_every_event_is_in_the_table_of_the_documentation(repository: Path) -> None:
    """docs/torch/metrics.md names the events that the code emits, each with its levels, and no others."""
    emitted: dict[str, set[str]] = {}
    for path in Path(tailbound.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "emit":
                name = ast.literal_eval(node.args[0])  # a test can only read names that are written out
                level = next((ast.unparse(k.value) for k in node.keywords if k.arg == "level"), "logging.WARNING")
                levels = {word.lower() for word in re.findall(r"logging\.([A-Z]+)", level)}
                emitted.setdefault(name, set()).update(levels)
    page = (repository / "docs" / "torch" / "metrics.md").read_text()
    table = page.split("| event | level | says |\n|---|---|---|\n")[1].split("\n\n")[0]
    documented: dict[str, set[str]] = {}
    for line in table.splitlines():
        _, names, levels, *_ = line.split("|")
        for name in re.findall(r"`(\w+)`", names):
            assert name not in documented, name
            documented[name] = set(re.findall(r"info|warning|error", levels))
    assert documented.keys() == emitted.keys()
    for name, levels in emitted.items():
        assert levels <= documented[name], name
