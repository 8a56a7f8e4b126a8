"""What cutting the tail is worth in time: a model of an all-reduce that goes on without what is late.

Two halves, one after the other. In each, every rank is sent its part over its own link, in a steady stream; foreign
bursts (``lab.traffic``) leave a tenth of the link, as in ``bench tail``. Codes, processors, TCP and Tailbound's way to
find its deadlines are not in it: it says what there is to gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from tailbound_lab.bench.calibrate import RATE_SHARE, search
from tailbound_lab.bench.figures import percentile
from tailbound_lab.lab.spec import Background
from tailbound_lab.lab.traffic import schedule

#: Seconds of a half that nothing disturbs.
HALF = 1.0
#: Share of the all-reduces that bursts hit; all-reduces of a run; probes for the right bursts.
_HIT, _STEPS, _PROBES = 0.25, 4000, 12
_SEED, _RANKS = 1, 4


class Cut(NamedTuple):
    """When a half is over: all but ``share`` has come to everybody, or ``patience`` seconds have passed."""

    share: float = 0.0
    patience: float = float("inf")


class _Link:
    """One rank's."""

    def __init__(self, background: Background, rank: int) -> None:
        self._bursts: Iterator[tuple[float, float]] = schedule(background, _SEED, rank)
        self._begin = self._end = 0.0

    def stream(self, begin: float, amount: float, until: float) -> tuple[float, float]:
        """When what takes ``amount`` seconds undisturbed, sent from ``begin`` on, is there, and how much of it is not.

        That is at ``until`` at the latest. ``begin`` never falls from call to call.
        """
        now, left = begin, amount
        while left > 0 and now < until:
            while self._end <= now:
                at, length = next(self._bursts)
                self._begin, self._end = at, at + length
            free = now < self._begin
            speed = 1.0 if free else 1 - RATE_SHARE
            end = min(now + left / speed, self._begin if free else self._end, until)
            left -= (end - now) * speed
            if left < 1e-9:
                left = 0.0
            now = end
        return now, left


def run(background: Background, cut: Cut, steps: int = _STEPS) -> tuple[list[float], float]:
    """Seconds of each all-reduce, and the share of all parts that was gone without."""
    links = [_Link(background, rank) for rank in range(_RANKS)]
    times: list[float] = []
    now = missing = 0.0
    for _ in range(steps):
        begin = now
        for _ in range(2):
            ends = [link.stream(now, HALF * (1 - cut.share), now + cut.patience) for link in links]
            missing += sum(left for _, left in ends) + len(links) * HALF * cut.share
            now = max(end for end, _ in ends)
        times.append(now - begin)
    return times, missing / (2 * len(links) * HALF * steps)


@cache
def bursts(tail: float) -> Background:
    """Bursts that give an all-reduce that waits for everything a P99/P50 of ``tail``."""
    on = (tail - 1) * 2 * HALF / RATE_SHARE
    first = Background(10**9, 1e3 * on, 1e3 * _RANKS * (2 * HALF + on) / _HIT)
    return search(tail, first, lambda background: run(background, Cut())[0], _PROBES)[0]


def rows(tails: Sequence[float], cuts: Sequence[Cut]) -> list[dict[str, Any]]:
    """For each tail and cut ``lost``, and ``mean`` and ``p99``: those of who waits for everything over those of it."""
    found = []
    for tail in tails:
        whole, _ = run(bursts(tail), Cut())
        for cut in cuts:
            times, lost = run(bursts(tail), cut)
            found.append(
                {
                    "kind": "cut", "tail": tail, "share": cut.share,
                    "patience": None if cut.patience == float("inf") else cut.patience / HALF, "lost": lost,
                    "mean": fmean(whole) / fmean(times), "p99": percentile(whole, 99) / percentile(times, 99),
                }
            )  # fmt: skip
    return found
