"""Requests for lost rows and their answers (clock-13, clock-23, clock-26): bounds, budgets and bodies, as pure parts.

Nothing here reads a clock, a map or a socket: times (ns) and what has been seen are arguments. ``transport.recovery``
decides which rows are lost. The pace of answers is bounded.

A REPAIR packet asks for rows of one list of an op. Header: ``rows`` of that list, ``row`` the place of the first bit.
Body: a bitmap, most significant bit first; a set bit is a missing row. With ``rows`` 0 it only asks for marks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import Places
from tailbound.transport.config import FLOOR, MS
from tailbound.transport.recovery import Path
from tailbound.wire.schema import serial_distance

#: Part of the pace that answers may take.
SHARE = 0.05
#: For so long nothing of an answer comes before it counts as lost, at most; at least for the floor of deadlines. Two
#: round trips are far less, but the owner's thread may be coding another op when it is asked.
PATIENCE_MOST = 50 * MS
#: How often a rank that waits for an answer looks, at least.
LOOK = 1 * MS


def patience(stage_two: int, floor: int) -> int:
    """How long contributions are waited for without progress: part of what results take, D2 of clock-11, in ns."""
    return min(PATIENCE_MOST, max(floor, stage_two // 4))


class Budget:
    """Bytes that may be spent on answers now: a share of the pace, saved up to ``depth``.

    Args:
        pace: bytes per second at which this rank sends; to be set anew whenever another one is in force.
        depth: bytes saved up at most.
    """

    def __init__(self, pace: float, depth: int = 256 << 10) -> None:
        self.pace, self._depth = pace, depth
        self._tokens, self._at = float(depth), 0

    def take(self, size: int, now: int) -> int:
        """How many of ``size`` bytes may be sent at ``now``; they are taken off."""
        if now > self._at:
            self._tokens = min(float(self._depth), self._tokens + (now - self._at) * 1e-9 * self.pace * SHARE)
            self._at = now
        granted = min(size, int(self._tokens))
        self._tokens -= granted
        return granted

    def give(self, size: int) -> None:
        """Puts back what was granted and not needed."""
        self._tokens += size

    def enough_in(self, size: int) -> int:
        """Nanoseconds until ``size`` bytes (at most the depth) are there."""
        lacking = min(size, self._depth) - self._tokens
        return int(lacking / (self.pace * SHARE) * 1e9) + 1 if lacking > 0 else 0


@dataclass
class Request:
    """Rows that one rank asked for and has not been sent yet."""

    label: int
    asker: int
    first_half: bool  #: contributions, not results
    layout: int
    places: Places
    sent: bool = False  #: some of what was asked for exists


class Requests:
    """What has been asked of this rank: newest op first, each row once per request.

    Args:
        most: requests kept; beyond them the oldest op's are forgotten (it will be asked for again, or was in vain).
    """

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._waiting: dict[tuple[int, int, bool], Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Takes a request; rows of the same op for the same rank are put together."""
        key = request.label, request.asker, request.first_half
        old = self._waiting.get(key)
        if old is not None and old.layout == request.layout:
            request.places = np.union1d(old.places, request.places)
        self._waiting[key] = request
        if len(self._waiting) > self._most:
            del self._waiting[_extreme(self._waiting, newest=False)]

    def newest(self, without: Collection[int] = ()) -> Request | None:
        """The request to answer first, of those of ranks that are not among ``without``."""
        left = [key for key in self._waiting if key[1] not in without]
        return self._waiting[_extreme(left, newest=True)] if left else None

    def done(self, request: Request, count: int) -> None:
        """The first ``count`` places of ``request`` have been dealt with."""
        request.places = request.places[count:]
        if not len(request.places):
            self._waiting.pop((request.label, request.asker, request.first_half), None)


def _extreme(found: Iterable[tuple[int, int, bool]], *, newest: bool) -> tuple[int, int, bool]:
    """The key of the newest or the oldest op; of one op's, the first."""
    keys = list(found)

    def age(key: tuple[int, int, bool]) -> int:
        return serial_distance(keys[0][0], key[0])

    return min(keys, key=age) if newest else max(keys, key=age)


class Repairs:
    """What a rank keeps about repair beside its ops: requests, budgets, and what answers have taught."""

    def __init__(self, ranks: int, floor: int = FLOOR) -> None:
        self.requests = Requests()
        self._budget = Budget(0.0)
        self._paced: dict[int, Budget] = {}  # of ranks that were ever sent to at a rate
        #: what requests have taught, by the rank that they went to
        self.paths = defaultdict[int, Path](lambda: Path(floor))
        #: rows asked for that came, by the rank that was asked: contributions and results
        self.came = np.zeros((2, ranks), np.int64)

    def take(self, asker: int, size: int, now: int, pace: float, rate: float) -> int:
        """How many of ``size`` bytes of answers may be sent to ``asker`` at ``now``; they are taken off.

        Args:
            asker: who has asked.
            size: bytes.
            now: ns.
            pace: bytes per second at which this rank sends to all others together.
            rate: bytes per second to which what is sent to ``asker`` is held; 0: not held.
        """
        self._budget.pace = pace
        granted = self._budget.take(size, now)
        if rate:
            own = self._paced.setdefault(asker, Budget(rate))
            own.pace = rate
            held = own.take(granted, now)
            self._budget.give(granted - held)
            granted = held
        return granted

    def give(self, asker: int, size: int, rate: float) -> None:
        """Puts back what ``take`` has granted and was not needed."""
        self._budget.give(size)
        if rate:
            self._paced[asker].give(size)

    def enough_in(self, asker: int, size: int, rate: float) -> int:
        """Nanoseconds until ``size`` bytes (at most what is saved up) may be sent to ``asker``, after ``take``."""
        return max(self._budget.enough_in(size), self._paced[asker].enough_in(size) if rate else 0)


def encode_repair(places: NDArray[np.int64], width: int) -> list[tuple[int, bytes]]:
    """(``row``, body) of the REPAIR packets that ask for ``places`` (i64[], rising), at most ``width`` bytes each."""
    out = []
    while len(places):
        first = int(places[0])
        here = places[places < first + 8 * width]
        bits = np.zeros(int(here[-1]) - first + 1, np.uint8)
        bits[here - first] = 1
        out.append((first, np.packbits(bits).tobytes()))
        places = places[len(here) :]
    return out


def decode_repair(body: bytes, row: int, rows: int) -> NDArray[np.int64] | None:
    """The places that a REPAIR packet asks for (i64[], rising); None if it asks for nothing or beyond ``rows``."""
    places: NDArray[np.int64] = np.flatnonzero(np.unpackbits(np.frombuffer(body, np.uint8))) + row
    if not len(places) or int(places[-1]) >= rows:
        return None
    return places
