"""Which link loses: loss of every peer's rows on their way here, window by window; the own link told apart. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

from tailbound.transport.episodes import Episodes, Turn

#: Rows that a peer should have brought until its loss is judged again.
WINDOW = 2000
#: A link that loses a larger share is named (as smoothed loss is, ``safeguard.Limits``); below the other it is well.
NAMED, WELL = 0.02, 0.005


class Loss(NamedTuple):
    """Something to say.

    Attributes:
        peer: whose rows get lost; None: those of (nearly) all peers, so it is the link of this rank.
        turn: begins, lasts or is over.
        share: of the rows, in the last window.
        others: median share of the other peers' rows.
    """

    peer: int | None
    turn: Turn
    share: float
    others: float


class Losses:
    """Loss by peer, as one receiver sees it."""

    def __init__(self, window: int | None = None) -> None:
        self._window = WINDOW if window is None else window
        self._before: dict[int, tuple[int, int]] = {}
        self._shares: dict[int, float] = {}
        self._episodes: Episodes[int | None] = Episodes(begin=2, end=2)

    def observe(self, totals: Mapping[int, tuple[int, int]], now: int) -> list[Loss]:
        """Takes by peer (rows expected, rows lost on the way) since the start of the job."""
        fresh = []
        for peer, (expected, lost) in totals.items():
            rows, gone = self._before.setdefault(peer, (0, 0))
            if expected - rows >= self._window:
                self._shares[peer] = (lost - gone) / (expected - rows)
                self._before[peer] = expected, lost
                fresh.append(peer)
        if not fresh:
            return []
        found = []
        middle = statistics.median_low(self._shares.values())
        own = len(self._shares) > 1 and middle > NAMED
        turn = self._episodes.see(None, _so(middle) if len(self._shares) > 1 else False, now)
        if turn:
            found.append(Loss(None, turn, middle, middle))
        for peer in fresh:
            share = self._shares[peer]
            others = [s for p, s in self._shares.items() if p != peer]
            typical = statistics.median_low(others) if others else 0.0
            # where all are lost alike, no single peer is to blame
            so = None if own and share < 2 * middle and not self._episodes.running(peer) else _so(share)
            if turn := self._episodes.see(peer, so, now):
                found.append(Loss(peer, turn, share, typical))
        return found


def _so(share: float) -> bool | None:
    return True if share > NAMED else False if share < WELL else None
