"""From "is it so now?" to what is worth a line in the log: it begins, it still lasts, it is over. Pure.

Beginning and end need several observations alike, so nothing flickers; reminders come ever more rarely.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

K = TypeVar("K", bound=Hashable)
Turn = Literal["begins", "lasts", "over"]

#: ns until the first reminder; each comes twice as long after the one before, this long at most.
FIRST, LONGEST = 30_000_000_000, 600_000_000_000


@dataclass
class _Episode:
    alike: int = 0
    running: bool = False
    begun: int = 0
    remind_at: int = 0
    pause: int = FIRST


class Episodes(Generic[K]):
    """Episodes by key.

    Args:
        begin, end: how many observations alike, one after the other, begin an episode and end it.
    """

    def __init__(self, begin: int, end: int) -> None:
        self._begin, self._end = begin, end
        self._all: dict[K, _Episode] = {}

    def running(self, key: K) -> bool:
        """Whether an episode of ``key`` runs."""
        return key in self._all and self._all[key].running

    def begun(self, key: K) -> int:
        """``at`` of the observation with which the last episode of ``key`` began; 0: there was none."""
        return self._all[key].begun if key in self._all else 0

    def see(self, key: K, so: bool | None, now: int, at: int = 0) -> Turn | None:
        """Takes one observation; returns what is to be said, if anything.

        Args:
            so: whether it is so; None: neither clearly so nor clearly not.
            now: ns.
            at: what ``begun`` is to say (a step).
        """
        one = self._all.setdefault(key, _Episode())
        if so is None or so is one.running:
            one.alike = 0
            if one.running and now >= one.remind_at:
                one.pause = min(2 * one.pause, LONGEST)
                one.remind_at = now + one.pause
                return "lasts"
            return None
        one.alike += 1
        if one.alike < (self._end if one.running else self._begin):
            return None
        if one.running:
            self._all[key] = _Episode(begun=one.begun)
            return "over"
        self._all[key] = _Episode(running=True, begun=at, remind_at=now + FIRST)
        return "begins"
