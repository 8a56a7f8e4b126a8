"""A timeline of ops and stages in Chrome's trace format (chrome://tracing, ui.perfetto.dev); bounded memory.

A rank keeps one only where ``TRACE_VARIABLE`` names a folder. Times are CLOCK_MONOTONIC of the host, so traces of ranks
on one host lie on one time axis and can be merged.
Format: "Trace Event Format", Google, asynchronous (b, e), instant (i) and metadata (M) events, times in us.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tailbound.observe.events import LogEvent
from tailbound.transport.steps import label_text

#: Environment variable: folder into which every rank writes its trace at the end.
TRACE_VARIABLE = "TAILBOUND_TRACE"
#: Ops kept; the oldest go first.
OPS_KEPT = 8_192


#: Name of a stage, when it begins (the first that is known counts) and when it ends (``Trace.add``).
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
        self._ops: deque[tuple[int, Mapping[str, int], Mapping[str, int]]] = deque(maxlen=keep)

    def add(self, label: int, times: Mapping[str, int], facts: Mapping[str, int]) -> None:
        """Keeps one op that is over, with ``facts`` for its span.

        Args:
            times: when it passed its stages on this rank, CLOCK_MONOTONIC in ns, 0: never; ``clock``: a majority was
                there (c of clock-3), ``queued``: the own rows were handed to the send queue.
        """
        self._ops.append((label, times, facts))

    def chrome(self, events: Iterable[LogEvent] = ()) -> dict[str, Any]:
        """The trace as the object that chrome://tracing loads; ``events`` become instants.

        Stages are asynchronous: they may overlap, and are told apart by category and op within the process of a rank.
        """
        where = {"pid": self._rank, "tid": 0}
        made: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "args": {"name": f"rank {self._rank}"}, **where}
        ]
        for label, times, facts in self._ops:
            for name, begins, end in _STAGES:
                begin, finish = next(filter(None, (times[b] for b in begins)), 0), times[end]
                if begin and finish >= begin:
                    stage = {"name": f"{name} {label_text(label)}", "cat": name, "id2": {"local": hex(label)}, **where}
                    made.append({"ph": "b", "ts": begin / 1000, "args": facts if name == "op" else {}, **stage})
                    made.append({"ph": "e", "ts": finish / 1000, **stage})
        made += [
            {"ph": "i", "s": "p", "name": e.name, "cat": "event", "ts": e.ns / 1000, "args": e.fields, **where}
            for e in events
        ]
        return {"traceEvents": made, "displayTimeUnit": "ms"}

    def write(self, path: Path, events: Iterable[LogEvent] = ()) -> None:
        """Writes the trace to ``path``.

        Raises:
            OSError: the file cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.chrome(events), default=str))
