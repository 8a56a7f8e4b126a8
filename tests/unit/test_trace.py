"""The timeline: valid for chrome://tracing, spans that do not overlap on a track, bounded."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

from tailbound.observe.events import LogEvent
from tailbound.observe.trace import Spans, Trace
from tailbound.wire.schema import op_label


def spans(at: int, length: int = 8000) -> Spans:
    return Spans(
        launched=at, admitted=at + 10, encoding=at + 20, queued=at + 400, sent=at + 1000, clock=at + 500,
        sealed=at + 3000, published=at + 3500, decoding=at + length - 500, finished=at + length,
    )  # fmt: skip


def of_kind(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == kind]


def test_every_stage_is_a_span() -> None:
    trace = Trace(2)
    trace.add(op_label(7, 1), spans(1_000_000), {"rows": 640, "delivered": 9})
    made = trace.chrome([LogEvent(1_005_000, "suspect", {"suspect": 1})])
    complete = {e["cat"]: e for e in of_kind(made, "X")}
    assert list(complete) == [
        "op", "queue", "agree", "encode", "send", "wait for contributions", "average and publish", "wait for results",
        "decode",
    ]  # fmt: skip
    whole = complete["op"]
    assert (whole["name"], whole["pid"], whole["ts"], whole["dur"]) == ("op 7.1", 2, 1000.0, 8.0)
    assert whole["args"] == {"rows": 640, "delivered": 9}
    assert (complete["encode"]["ts"], complete["encode"]["dur"]) == (1000.02, 0.38)
    assert (complete["send"]["ts"], complete["send"]["dur"]) == (1000.4, 0.6)
    assert complete["wait for contributions"]["ts"] == 1000.5
    assert [(e["name"], e["ts"], e["args"]) for e in of_kind(made, "i")] == [("suspect", 1005.0, {"suspect": 1})]
    named = {e["tid"] for e in of_kind(made, "M") if e["name"] == "thread_name"}
    assert {e["tid"] for e in of_kind(made, "X")} <= named


def test_overlapping_ops_get_tracks_of_their_own() -> None:
    trace = Trace(0)
    for i in range(20):
        trace.add(op_label(0, i), spans(1_000_000 + 3000 * i), {})
    tracks = defaultdict(list)
    for event in of_kind(trace.chrome(), "X"):
        tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for on_track in tracks.values():
        on_track.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(on_track))
    assert len([t for t in tracks if t < 1000]) == 3


def test_a_stage_that_never_was_has_no_span() -> None:
    trace = Trace(0)
    trace.add(1, Spans(launched=10, sealed=20, published=30, decoding=40, finished=50), {})  # late: nothing was sent
    assert {e["cat"] for e in of_kind(trace.chrome(), "X")} == {
        "op",
        "average and publish",
        "wait for results",
        "decode",
    }


def test_memory_is_bounded_and_the_newest_are_kept() -> None:
    trace = Trace(0, keep=8)
    for i in range(100):
        trace.add(op_label(0, i), spans(10_000 * (i + 1)), {})
    assert {e["name"] for e in of_kind(trace.chrome(), "X") if e["cat"] == "op"} == {
        f"op 0.{i}" for i in range(92, 100)
    }
