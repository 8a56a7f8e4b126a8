"""A timeline of ops and stages in Chrome's trace format (chrome://tracing, ui.perfetto.dev); bounded memory.

One row of a ring of integers an op is kept while it runs; everything else is done when the trace is written. Times are
CLOCK_MONOTONIC of the host, so traces of ranks on one host lie on one time axis and can be merged.
Format: "Trace Event Format", Google, complete (X), instant (i) and metadata (M) events, times in us.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from tailbound.observe.events import LogEvent
from tailbound.transport.steps import label_text

#: Environment variable: folder into which every rank writes its trace at the end.
TRACE_VARIABLE = "TAILBOUND_TRACE"
#: Ops kept; the oldest go first.
OPS_KEPT = 16_384
#: What is kept of an op beside its label, rows and times.
FACTS = ("expected", "delivered", "late", "skipped", "deadline_hits", "missing", "map")


@dataclass(slots=True)
class Spans:
    """When an op passed its stages on this rank, CLOCK_MONOTONIC in ns; 0: not (yet)."""

    clock: int = 0  #: a majority was there (c of clock-3)
    launched: int = 0
    admitted: int = 0
    encoding: int = 0
    queued: int = 0  #: the own rows were handed to the send queue: the first are about to leave
    sent: int = 0
    sealed: int = 0
    published: int = 0
    decoding: int = 0
    finished: int = 0


_TIMES = tuple(Spans.__dataclass_fields__)
_COLUMNS = ("label", "rows", *_TIMES, *FACTS)
_times = attrgetter(*_TIMES)
#: ``struct`` writes a row in a third of the time that an array takes for it.
_ROW = struct.Struct(f"={len(_COLUMNS)}q")
#: Name of a stage, where it begins (the first that is known counts) and where it ends, as fields of ``Spans``.
_STAGES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("op", ("launched", "clock"), "finished"),
    ("queue", ("launched",), "admitted"),
    ("agree", ("admitted",), "encoding"),
    ("encode", ("encoding",), "queued"),
    ("send", ("queued",), "sent"),
    ("wait for contributions", ("clock", "sent"), "sealed"),
    ("average and publish", ("sealed",), "published"),
    ("wait for results", ("published",), "decoding"),
    ("decode", ("decoding",), "finished"),
)


class Trace:
    """Keeps the last ops of one rank."""

    def __init__(self, rank: int, keep: int = OPS_KEPT) -> None:
        self._rank = rank
        self._ops = np.zeros((keep, len(_COLUMNS)), np.int64)  # touched, and so taken, only as far as it is filled
        self._memory = self._ops.view(np.uint8).reshape(-1).data
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, len(self._ops))

    def add(self, label: int, rows: int, spans: Spans, **facts: int) -> None:
        """Keeps one op that is over; ``facts`` are those of ``FACTS``."""
        at = self._count % len(self._ops) * _ROW.size
        _ROW.pack_into(self._memory, at, label, rows, *_times(spans), *[facts.get(name, 0) for name in FACTS])
        self._count += 1

    def chrome(self, events: Iterable[LogEvent] = ()) -> dict[str, Any]:
        """The trace as the object that chrome://tracing loads; ``events`` become instants.

        Overlapping spans must not share a track, so each stage has as many tracks as it needs: process = rank,
        thread = stage and track.
        """
        made: list[dict[str, Any]] = [_about("process_name", self._rank, 0, name=f"rank {self._rank}")]
        ops = [dict(zip(_COLUMNS, row, strict=True)) for row in self._ops[: len(self)].tolist()]
        for stage, (name, begins, end) in enumerate(_STAGES):
            spans = []
            for op in ops:
                begin = next((op[b] for b in begins if op[b]), 0)
                if begin and op[end] >= begin:
                    spans.append((begin, op[end], op))
            spans.sort(key=lambda s: (s[0], s[1]))
            tracks: list[int] = []
            for begin, finish, op in spans:
                track = next((i for i, free in enumerate(tracks) if free <= begin), len(tracks))
                if track == len(tracks):
                    tracks.append(0)
                    thread = stage * 1000 + track
                    called = f"{name} {track}" if track else name
                    made.append(_about("thread_name", self._rank, thread, name=called))
                    made.append(_about("thread_sort_index", self._rank, thread, sort_index=thread))
                tracks[track] = finish
                made.append(
                    {
                        "ph": "X",
                        "name": f"{name} {label_text(op['label'])}",
                        "cat": name,
                        "pid": self._rank,
                        "tid": stage * 1000 + track,
                        "ts": begin / 1000,
                        "dur": (finish - begin) / 1000,
                        "args": {name: op[name] for name in ("rows", *FACTS)} if stage == 0 else {},
                    }
                )
        made += [
            {"ph": "i", "s": "p", "name": e.name, "cat": "event", "pid": self._rank, "tid": 0, "ts": e.ns / 1000,
             "args": e.fields}
            for e in events
        ]  # fmt: skip
        return {"traceEvents": made, "displayTimeUnit": "ms"}

    def write(self, path: str | Path, events: Iterable[LogEvent] = ()) -> Path:
        """Writes the trace to ``path`` at one blow.

        Raises:
            OSError: the file cannot be written.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        half = target.with_name(f"{target.name}.{os.getpid()}.part")
        half.write_text(json.dumps(self.chrome(events), default=str))
        half.replace(target)
        return target


def _about(kind: str, process: int, thread: int, **facts: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": facts}
