"""What a worker sends a switch again, when, and whether with FLUSH. Pure, with the time passed in.

A switch has no timers and keeps no list of who waits: a row that lacks a contribution waits, and a result that was lost
is sent again only to who asks, by sending its contribution again. Two reasons to:

- **A gap**: later rows' results have been in for a while, or nothing comes any more although everybody has sent all.
  Every sender's rows keep their order, so that either half of such a row was lost. Sent without FLUSH it completes the
  row, or fetches the stored mean; it never releases a partial mean.
- **The deadline** (clock-28): with FLUSH the row is released with what is in, for everybody. Every live rank
  first does so for its own share of the rows only; for what is still missing after that, for all.

Nothing is a storm: a row is repeated a few times at most and at growing intervals, gaps take as many as
half of the op's rows in all, and flushes go out in a window that grows with the answers; after a few windows without
any there is no switch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import Places
from tailbound.transport.backoff import AnswerTime, Policy
from tailbound.transport.config import MS

#: An answer that has not come for so long, or for twice as long as answers take, is lost; doubles with every repeat.
PATIENCE, PATIENCE_MOST = 5 * MS, 100 * MS
#: How often a row is sent again at most, without FLUSH and with.
REPEATS, FLUSHES = 5, 6
#: Part of an op's rows that gaps may take at once, and rows in any case, also later, once it is quiet.
GAPS, GAPS_LEAST = 0.5, 16
#: Rows flushed before the first answer, and at most before the next one; windows without an answer that are enough.
WINDOW, WINDOW_MOST, SILENT = 256, 4096, 6
#: Rows are looked through no more often than this, and less often in large ops: ns a row.
LOOK, _LOOK_ROW = 1 * MS, 250


@dataclass(frozen=True)
class View:
    """What a worker sees of one op.

    Attributes:
        progress: results that are in.
        missing: places (in the switch's list, i64[], rising) of those that are not; only called when it matters.
        sent: whether all own contributions have left.
        finished: whether all that are waited for have said that theirs have.
        short: whether it is known that a rank waited for brings no rows.
        due: whether the deadline has passed.
    """

    progress: int
    missing: Callable[[], Places]
    sent: bool
    finished: bool
    short: bool
    due: bool


class Again(NamedTuple):
    """Contributions to send again."""

    places: Places
    flush: bool


class Retry:
    """One worker's repeats in one op.

    Args:
        rows: of the op.
        index, of: this rank's place among the live ones, and how many they are.
        patience: learns how long answers to rows that are sent again once take; one for all ops.
    """

    def __init__(self, rows: int, index: int, of: int, patience: AnswerTime) -> None:
        self._patience = patience
        self._rows, self._index, self._of = rows, index, max(1, of)
        self._times: NDArray[np.int64] = np.zeros(rows, np.int64)
        self._sent_at: NDArray[np.int64] = np.zeros(rows, np.int64)
        self._gaps = max(GAPS_LEAST, int(rows * GAPS))
        self._progress, self._moved = -1, 0
        #: when to call ``poll`` again, ns; 0: not before something arrives
        self.look = 0
        self._reached = 0  # at the last look, results had come for places up to here
        self._window, self._silent, self._asked_at, self._at_asking = WINDOW, 0, 0, 0
        self.flushing = False
        #: rows sent again without FLUSH
        self.gaps = 0

    @property
    def _again(self) -> Policy:
        """How a row or a window is repeated; how often, differs."""
        return Policy(self._patience.value)

    @property
    def _waits(self) -> NDArray[np.int64]:
        """How long the answer to a row is waited for, by how often it has been sent again: i64[FLUSHES + 1]."""
        return np.array([self._again.wait(max(1, times)) for times in range(FLUSHES + 1)])

    def poll(self, now: int, view: View, pause: int) -> list[Again]:
        """What to send again now.

        Args:
            now: the time, ns.
            view: the op.
            pause: so long rows may be on their way, and nothing must have come, before it means anything (q).
        """
        if view.progress != self._progress:
            self._progress, self._moved = view.progress, now
        if now < self.look:
            return []
        self.look = now + max(LOOK, pause, _LOOK_ROW * self._rows)
        quiet = now - self._moved >= pause
        out: list[Again] = []
        if not (self.flushing or view.due or (view.short and view.finished and view.sent and quiet)):
            if view.progress:  # else no rank knows yet whether all have begun
                self._add(out, self._overtaken(now, view, quiet), now, flush=False)
        else:
            if not self.flushing:
                self.flushing = True
                self._times[:], self._sent_at[:] = 0, 0
            self._add(out, self._unreleased(now, view), now, flush=True)
        return out

    def _overtaken(self, now: int, view: View, quiet: bool) -> Places:
        """Rows whose results are probably lost, or whose contributions are."""
        missing = self._look_through(now, view)
        last = view.sent and quiet and view.finished
        gaps = missing if last else missing[: np.searchsorted(missing, self._reached)]
        self._reached = _reached(missing, self._rows)
        idle = quiet and now - self._sent_at.max() >= self._patience.value
        most = max(GAPS_LEAST if idle else 0, self._gaps - self.gaps)
        return self._ripe(gaps, now)[:most]

    def _unreleased(self, now: int, view: View) -> Places:
        """Rows to be released now: those of the own share first, as many as the window takes."""
        if self._asked_at:
            if view.progress > self._at_asking:
                self._silent = 0
                self._window = min(WINDOW_MOST, 2 * self._window)
            elif self._silent >= SILENT or now - self._asked_at < self._again.wait(self._silent + 1):
                return np.zeros(0, np.int64)
            else:
                self._silent, self._window = self._silent + 1, WINDOW
        missing = self._look_through(now, view)
        times = self._times[missing]
        waiting = (times > 0) & (now - self._sent_at[missing] < self._waits[times])
        others = now - max(self._moved, self._sent_at.max()) >= self._patience.value  # who has those has gone quiet
        mine = missing[~waiting & (others | (missing % self._of == self._index))]
        ripe: Places = mine[self._times[mine] < FLUSHES][: max(0, self._window - int(waiting.sum()))]
        if len(ripe):
            self._asked_at, self._at_asking = now, view.progress
        return ripe

    def _look_through(self, now: int, view: View) -> Places:
        """The places that are missing; what has been answered since the last look tells how long that takes."""
        missing = view.missing()
        here = np.ones(self._rows, bool)
        here[missing] = False
        answered = np.flatnonzero(here & (self._times == 1))
        if len(answered):
            self._patience.add(now - int(np.median(self._sent_at[answered])))
            self._times[answered] = REPEATS  # counted once
        return missing

    def _ripe(self, places: Places, now: int) -> Places:
        """Those of ``places`` that have not been sent again lately, nor too often."""
        times = self._times[places]
        due = self._sent_at[places] + self._waits[times] <= now
        ripe: Places = places[(times == 0) | (due & (times < REPEATS))]
        return ripe

    def _add(self, out: list[Again], places: Places, now: int, *, flush: bool) -> None:
        if not len(places):
            return
        self._times[places] += 1
        self._sent_at[places] = now
        if not flush:
            self.gaps += len(places)
        out.append(Again(places, flush))


def _reached(missing: Places, rows: int) -> int:
    """One past the last place that is not in ``missing`` (rising)."""
    tail = np.flatnonzero(missing[::-1] != rows - 1 - np.arange(len(missing)))
    return rows - (int(tail[0]) if len(tail) else len(missing))
