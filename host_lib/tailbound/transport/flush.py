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

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import Places
from tailbound.transport.config import MS

#: An answer that has not come for so long is lost; doubles with every repeat.
PATIENCE = 5 * MS
#: How often a row is sent again without FLUSH at most.
REPEATS = 5
#: Part of an op's rows that gaps may take at once, and rows in any case, also later, once it is quiet.
GAPS, GAPS_LEAST = 0.5, 16
#: Rows flushed before the first answer, and at most before the next one; windows without an answer that are enough.
WINDOW, WINDOW_MOST, SILENT = 256, 4096, 6
#: Rows are looked through no more often than this, and less often in large ops: ns a row.
LOOK, _LOOK_ROW = 1 * MS, 250
#: When a row was sent again that never was: before any patience, on a machine that has just begun, too.
_NEVER = -1_000 * MS


class Retry:
    """One worker's repeats in one op.

    Args:
        rows: of the op.
        index, of: this rank's place among the live ones, and how many they are.

    Attributes:
        look: when to call ``poll`` again, ns; 0: not before something arrives.
        flushing: whether what is sent again has FLUSH, from the last ``poll`` on.
    """

    def __init__(self, rows: int, index: int, of: int) -> None:
        self._rows, self._index, self._of = rows, index, max(1, of)
        self._times: NDArray[np.int64] = np.zeros(rows, np.int64)  # sent again without FLUSH
        self._sent_at: NDArray[np.int64] = np.full(rows, _NEVER, np.int64)
        self._gaps = max(GAPS_LEAST, int(rows * GAPS))  # that may be sent again still
        self._progress, self._moved = -1, 0
        self._reached = 0  # at the last look, results had come for places up to here
        self._window, self._silent, self._asked_at, self._at_asking = WINDOW, 0, 0, -1
        self.look, self.flushing = 0, False

    def poll(
        self,
        now: int,
        pause: int,
        progress: int,
        missing: Callable[[], Places],
        *,
        sent: bool,
        finished: bool,
        short: bool,
        due: bool,
    ) -> Places:
        """Places of the contributions to send again now, in the switch's list.

        Args:
            now: the time, ns.
            pause: so long rows may be on their way, and nothing must have come, before it means anything (q).
            progress: results that are in.
            missing: places of those that are not, i64[], rising; only called when it matters.
            sent: whether all own contributions have left.
            finished: whether all that are waited for have said that theirs have.
            short: whether it is known that a rank waited for brings no rows.
            due: whether the deadline has passed.
        """
        if progress != self._progress:
            self._progress, self._moved = progress, now
        if now < self.look:
            return np.zeros(0, np.int64)
        self.look = now + max(LOOK, pause, _LOOK_ROW * self._rows)
        quiet = now - self._moved >= pause
        last = sent and finished and quiet
        if not self.flushing and (due or (short and last)):
            self.flushing = True
            self._sent_at[:] = _NEVER
        if self.flushing:
            ripe = self._unreleased(now, missing)
        elif progress:  # else no rank knows yet whether all have begun
            ripe = self._overtaken(now, missing(), quiet, last)
        else:
            return np.zeros(0, np.int64)
        self._sent_at[ripe] = now
        return ripe

    def _overtaken(self, now: int, missing: Places, quiet: bool, last: bool) -> Places:
        """Rows whose results are probably lost, or whose contributions are."""
        gaps = missing if last else missing[: np.searchsorted(missing, self._reached)]
        self._reached = _reached(missing, self._rows)
        idle = quiet and now - self._sent_at.max() >= PATIENCE
        times = self._times[gaps]
        due = (times < REPEATS) & (now - self._sent_at[gaps] >= (PATIENCE << times) >> 1)
        ripe: Places = gaps[due][: max(GAPS_LEAST if idle else 0, self._gaps)]
        self._times[ripe] += 1
        self._gaps -= len(ripe)
        return ripe

    def _unreleased(self, now: int, missing: Callable[[], Places]) -> Places:
        """Rows to be released now: those of the own share first, as many as the window takes."""
        if self._at_asking >= 0:
            if self._progress > self._at_asking:
                self._silent, self._window = 0, min(WINDOW_MOST, 2 * self._window)
            elif self._silent >= SILENT or now - self._asked_at < PATIENCE << self._silent:
                return np.zeros(0, np.int64)
            else:
                self._silent, self._window = self._silent + 1, WINDOW
        places = missing()
        waiting = now - self._sent_at[places] < PATIENCE
        others = now - max(self._moved, self._sent_at.max()) >= PATIENCE  # who has those has gone quiet
        mine = places[~waiting & (others | (places % self._of == self._index))]
        ripe: Places = mine[: max(0, self._window - int(waiting.sum()))]
        if len(ripe):
            self._asked_at, self._at_asking = now, self._progress
        return ripe


def _reached(missing: Places, rows: int) -> int:
    """One past the last place that is not in ``missing`` (rising)."""
    tail = np.flatnonzero(missing[::-1] != rows - 1 - np.arange(len(missing)))
    return rows - (int(tail[0]) if len(tail) else len(missing))
