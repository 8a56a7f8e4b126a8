"""What a rank notes: events, the timeline of ops, and the books of rows by peer and stage."""

from __future__ import annotations

import ast
import logging
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tailbound
from support import balanced
from tailbound.observe.events import LINES, PERIOD, Events, LogEvent
from tailbound.observe.ledger import Ledger
from tailbound.observe.trace import Trace
from tailbound.wire.schema import VERDICTS, Stage, Verdict, op_label


def test_an_event_is_kept_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    events = Events(3, lambda: 0)
    with caplog.at_level(logging.INFO, "tailbound"):
        events.emit("suspect", suspect=1, stage="results")
        events.emit("map", "a new map", level=logging.INFO, id=7)
    said = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert said == [("WARNING", "rank 3: suspect suspect=1 stage=results"), ("INFO", "rank 3: a new map")]
    assert caplog.records[1].tailbound == {"event": "map", "id": 7}
    assert [(e.name, e.fields) for e in events.recent()][1] == ("map", {"id": 7})
    assert events.counts == {"suspect": 1, "map": 1}


def test_a_flood_is_thinned_out_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    now = [0]
    events = Events(0, lambda: now[0], keep=16)
    with caplog.at_level(logging.WARNING, "tailbound"):
        for i in range(100):
            events.emit("loss", op=i)
        events.emit("other")
        assert len(caplog.records) == LINES + 1
        now[0] += PERIOD
        events.emit("loss", op=100)
    assert caplog.records[-1].getMessage().endswith(f"({100 - LINES} more like it were not logged)")
    assert events.counts["loss"] == 101
    assert [e.fields.get("op") for e in events.recent(3)] == [99, None, 100]
    assert len(events.recent()) == 16 + 1


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


def times(at: int, length: int = 8000) -> dict[str, int]:
    return {
        "launched": at, "admitted": at + 10, "encoding": at + 20, "queued": at + 400, "sent": at + 1000,
        "clock": at + 500, "sealed": at + 3000, "published": at + 3500, "decoding": at + length - 500,
        "finished": at + length,
    }  # fmt: skip


def of_kind(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == kind]


def test_every_stage_is_a_span() -> None:
    trace = Trace(2)
    trace.add(op_label(7, 1), times(1_000_000), {"rows": 640, "delivered": 9})
    made = trace.chrome([LogEvent(1_005_000, "suspect", {"suspect": 1})])
    begun, ended = ({e["cat"]: e for e in of_kind(made, kind)} for kind in "be")
    assert list(begun) == [
        "op", "queue", "agree", "encode", "send", "wait for contributions", "average and publish", "wait for results",
        "decode",
    ]  # fmt: skip
    whole = begun["op"]
    assert (whole["name"], whole["pid"], whole["args"]) == ("op 7.1", 2, {"rows": 640, "delivered": 9})
    ends = [(begun[name]["ts"], ended[name]["ts"]) for name in ("op", "encode", "send", "wait for contributions")]
    assert ends == [(1000.0, 1008.0), (1000.02, 1000.4), (1000.4, 1001.0), (1000.5, 1003.0)]
    assert [(e["name"], e["ts"], e["args"]) for e in of_kind(made, "i")] == [("suspect", 1005.0, {"suspect": 1})]


def test_overlapping_ops_are_told_apart_and_the_newest_are_kept() -> None:
    trace = Trace(0, keep=20)
    for i in range(100):
        trace.add(op_label(0, i), times(1_000_000 + 3000 * i), {})
    begun, ended = ([(e["cat"], e["id2"]["local"], e["name"]) for e in of_kind(trace.chrome(), kind)] for kind in "be")
    assert {name for _, _, name in begun if name.startswith("op ")} == {f"op 0.{i}" for i in range(80, 100)}
    assert begun == ended
    assert len({(category, op) for category, op, _ in begun}) == len(begun)


def test_a_stage_that_never_was_has_no_span() -> None:
    trace = Trace(0)
    trace.add(1, times(10) | dict.fromkeys(("admitted", "encoding", "queued", "sent", "clock"), 0), {})  # it was late
    made = {e["cat"] for e in of_kind(trace.chrome(), "b")}
    assert made == {"op", "average and publish", "wait for results", "decode"}


def verdicts(**counts: int) -> np.ndarray:
    made = np.zeros(VERDICTS, np.uint64)
    for name, count in counts.items():
        made[Verdict[name]] = count
    return made


def close(ledger: Ledger, stage: Stage, expected: int, taken: int, *, finished: bool) -> None:
    """Enters what a stage of an op came to of rank 1."""
    line = ledger.lines[stage][1]
    line.ops, line.expected, line.taken = line.ops + 1, line.expected + expected, line.taken + taken
    missing = "gaps" if finished else "open"
    setattr(line, missing, getattr(line, missing) + expected - taken)


@pytest.mark.parametrize(
    ("closed", "came", "found"),
    [
        ([(100, 97, True)], {}, {
            "ops": 1, "expected": 100, "taken": 97, "missing": 3, "late": 0, "lost": 3, "refused": 0, "absent": 0,
            "repaired": 0, "duplicated": 0,
        }),
        ([(100, 40, False)], {}, {"absent": 60, "lost": 0}),
        ([(100, 40, False)], {"LATE": 50, "STALE_OP": 7, "DUPLICATE": 2},
         {"late": 57, "lost": 0, "absent": 3, "duplicated": 2}),
        ([(50, 40, True), (50, 45, False)], {"SCALE_MISMATCH": 12, "LATE": 2},
         {"refused": 12, "lost": 0, "late": 2, "absent": 1}),
    ],
    ids=["below the finished mark it is lost", "after the seal it is absent", "or late, but not lost", "refused first"],
)  # fmt: skip
def test_what_is_missing_is_booked_by_its_cause(
    closed: list[tuple[int, int, bool]], came: dict[str, int], found: dict[str, int]
) -> None:
    """``closed``: of each op the rows expected and taken, and whether its mark was finished."""
    ledger = Ledger(2)
    for expected, taken, finished in closed:
        close(ledger, Stage.CONTRIBUTIONS, expected, taken, finished=finished)
    entry = ledger.entry(Stage.CONTRIBUTIONS, 1, verdicts(**came))
    assert entry == entry | found
    assert balanced(entry)


def test_rows_of_another_map_or_layout_are_refused_and_not_lost() -> None:
    """They may be of either stage: no row is booked twice."""
    ledger = Ledger(2)
    close(ledger, Stage.CONTRIBUTIONS, 50, 30, finished=True)
    close(ledger, Stage.RESULTS, 50, 40, finished=True)
    for name in ("WRONG_MAP", "LAYOUT_MISMATCH", "SLOT_OUT_OF_RANGE", "NOT_FOR_THIS_RANK"):
        first, second = (ledger.entry(stage, 1, verdicts(**{name: 25})) for stage in Stage)
        assert (first["refused"], first["lost"], second["refused"], second["lost"]) == (20, 0, 5, 5)
        assert ledger.lost(1, verdicts(**{name: 25})) == (100, 5)
    assert ledger.lost(1, verdicts(WRONG_MAP=25, SCALE_MISMATCH=10, FUTURE_RESULT=9)) == (100, 0)
    assert ledger.lost(1, verdicts(LATE=25)) == (100, 30)


def test_whatever_happens_the_books_balance() -> None:
    draw = random.Random(5)
    for _ in range(300):
        ledger = Ledger(2)
        for stage in Stage:
            for _ in range(draw.randrange(4)):
                expected = draw.randrange(50)
                close(ledger, stage, expected, draw.randint(0, expected), finished=draw.random() < 0.5)
        seen = verdicts(**{v.name: draw.randrange(60) for v in Verdict})
        for stage in Stage:
            assert balanced(ledger.entry(stage, 1, seen))
