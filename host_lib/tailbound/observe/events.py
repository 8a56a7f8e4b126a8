"""Structured events of one rank: logged as text with fields, counted, and the last ones kept for the trace and `top`.

An event is a name and fields of plain types: ``emit("suspect", suspect=3, stage="contributions", op="3.1")``. The text
goes to the logger ``tailbound``; the fields travel with the record (``record.tailbound``), so that a
formatter can write them as data. A flood of one kind is thinned out in the log, never in the counts.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

log = logging.getLogger("tailbound")

#: Events kept in memory, and of one kind at most, so that no flood displaces the others.
KEPT, KEPT_ALIKE = 512, 64
#: Lines in the log per kind and period; the others are counted and told of with the next line.
LINES, PERIOD = 5, 10_000_000_000


class LogEvent(NamedTuple):
    """One event: when (CLOCK_MONOTONIC, ns), what, and its fields."""

    ns: int
    name: str
    fields: dict[str, Any]


class Thinned:
    """The log of one rank: of each kind of sentence ``LINES`` lines in ``PERIOD``; the next one says how many more.

    Args:
        rank: at the head of every line.
        clock: CLOCK_MONOTONIC in ns.
    """

    def __init__(self, rank: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._rank, self._clock = rank, clock
        self._lines: dict[str, tuple[int, int, int]] = {}  # by kind: begin of the period, lines in it, lines left out

    def say(self, level: int, kind: str, text: str, extra: dict[str, Any] | None = None) -> None:
        """Logs ``text``, a sentence of ``kind``, with ``extra`` as the record's own, or counts it as left out."""
        if not log.isEnabledFor(level):
            return
        now = self._clock()
        since, lines, left_out = self._lines.get(kind, (now, 0, 0))
        if now - since >= PERIOD:
            since, lines = now, 0
        if lines >= LINES:
            self._lines[kind] = (since, lines, left_out + 1)
            return
        self._lines[kind] = (since, lines + 1, 0)
        if left_out:
            text += f" ({left_out} more like it were not logged)"
        log.log(level, "rank %d: %s", self._rank, text, extra=extra)


class Events:
    """The events of one rank; ``emit`` may be called by any thread.

    Args:
        rank: own rank, in every line and record.
        clock: CLOCK_MONOTONIC in ns.
        keep: events of a kind that are kept for ``recent``.
    """

    def __init__(self, rank: int, clock: Callable[[], int] = time.monotonic_ns, keep: int = KEPT_ALIKE) -> None:
        self._clock, self._log = clock, Thinned(rank, clock)
        # by kind, with the number of each
        self._kept = defaultdict[str, deque[tuple[int, LogEvent]]](lambda: deque(maxlen=keep))
        #: how often each kind has happened, left out of the log or not
        self.counts: Counter[str] = Counter()

    def emit(self, event: str, text: str = "", /, *, level: int = logging.WARNING, **fields: Any) -> None:
        """Notes one event.

        Args:
            event: its name, one or two words with underscores, the same for all events of the kind.
            text: a sentence for people; without it, the fields.
            level: of the ``logging`` module.
            fields: plain types (what json can write).
        """
        self.counts[event] += 1
        self._kept[event].append((self.counts.total(), LogEvent(self._clock(), event, fields)))
        said = text or " ".join([event, *(f"{name}={value}" for name, value in fields.items())])
        self._log.say(level, event, said, {"tailbound": {"event": event, **fields}})

    def recent(self, most: int = KEPT) -> list[LogEvent]:
        """The last events, oldest first: where there is no room for all, as many of each kind as there is room for."""
        kinds = [list(kept)[::-1] for kept in list(self._kept.values())]  # another thread may add
        ranked = [(place, -number, event) for kept in kinds for place, (number, event) in enumerate(kept)]
        chosen = sorted(ranked, key=itemgetter(0, 1))[:most]
        return [event for *_, event in sorted(chosen, key=itemgetter(1), reverse=True)]
