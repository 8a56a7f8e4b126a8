"""Requests for lost rows and their answers (clock-13, clock-23, clock-26): bounds, budgets and bodies, as pure parts.

Nothing here reads a clock, a map or a socket: times (ns) and what has been seen are arguments. ``transport.recovery``
decides which rows are lost. The pace of answers is bounded.

A REPAIR packet asks for rows of one list of an op. Header: ``rows`` of that list, ``row`` the place of the first bit.
Body: a bitmap, most significant bit first; a set bit is a missing row. With ``rows`` 0 it only asks for marks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import Places
from tailbound.transport.config import FLOOR
from tailbound.transport.recovery import paths
from tailbound.wire.schema import serial_distance

#: Part of the pace to a rank that answers to it may take; lost results are insisted on, and have more.
SHARE, RESULTS = 0.1, 5


class Budget:
    """Bytes of answers that may be sent to one rank now: a share of what it can be sent, saved up to ``depth``.

    Args:
        depth: bytes saved up at most.
    """

    def __init__(self, depth: int = 256 << 10) -> None:
        self._depth = depth
        self._tokens, self._at = float(depth), 0

    def ready(self, now: int, pace: float) -> int:
        """Bytes that may be sent at ``now``, where ``pace`` bytes per second are possible."""
        if now > self._at:
            self._tokens = min(float(self._depth), self._tokens + (now - self._at) * 1e-9 * pace * SHARE)
            self._at = now
        return int(self._tokens)

    def spend(self, size: int) -> None:
        """So many bytes are sent now."""
        self._tokens -= size

    def enough_in(self, size: int, pace: float) -> int:
        """Nanoseconds until ``size`` bytes (at most the depth) are there."""
        lacking = min(size, self._depth) - self._tokens
        return int(lacking / (pace * SHARE) * 1e9) + 1 if lacking > 0 else 0


@dataclass
class Request:
    """Rows that one rank asked for and has not been sent yet."""

    label: int
    asker: int
    first_half: bool  #: contributions, not results
    layout: int
    places: Places

    @property
    def key(self) -> tuple[int, int, bool]:
        """Requests of one key are put together."""
        return self.label, self.asker, self.first_half


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
        old = self._waiting.get(request.key)
        if old is not None and old.layout == request.layout:
            request.places = np.union1d(old.places, request.places)
        self._waiting[request.key] = request
        if len(self._waiting) > self._most:
            del self._waiting[max(self._waiting.values(), key=self._age).key]

    def newest(self, without: Collection[int] = ()) -> Request | None:
        """The request to answer first, of those of ranks that are not among ``without``."""
        left = (request for request in self._waiting.values() if request.asker not in without)
        return min(left, key=self._age, default=None)

    def done(self, request: Request, count: int) -> None:
        """The first ``count`` places of ``request`` have been dealt with."""
        request.places = request.places[count:]
        if not len(request.places):
            self._waiting.pop(request.key, None)

    def _age(self, request: Request) -> int:
        return serial_distance(next(iter(self._waiting))[0], request.label)


class Repairs:
    """What a rank keeps about repair beside its ops: requests, budgets, and what answers have taught."""

    def __init__(self, ranks: int, floor: int = FLOOR) -> None:
        self.requests = Requests()
        self.budgets = defaultdict[int, Budget](Budget)  #: by the rank that is answered
        #: what requests have taught, by the rank that they went to
        self.paths = paths(ranks, floor)
        #: rows asked for that came, by the rank that was asked: contributions and results
        self.came = np.zeros((2, ranks), np.int64)


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
