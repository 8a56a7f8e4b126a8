"""Requests for lost rows and their answers (clock-13, clock-23, clock-26): what is kept of them, and bodies.

The library decides which rows are lost (``host_lib/core/recovery.c``), keeps what others ask for (``answers.c``), and
bounds the pace of answers.

A REPAIR packet asks for rows of one list of an op. Header: ``rows`` of that list, ``row`` the place of the first bit.
Body: a bitmap, most significant bit first; a set bit is a missing row. With ``rows`` 0 it only asks for marks.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.kernel.core import address, core
from tailbound.transport.config import FLOOR
from tailbound.wire.packets import record_of
from tailbound.wire.schema import ANSWERS, ASKING

Asking = record_of(ASKING)


class Path(record_of(ANSWERS)):  # type: ignore[misc]
    """What requests to one peer have taught: the time of an answer, and how far rows overtake (``tb_answers``).

    Args:
        floor: the shortest deadline.
    """

    window: int
    twice: int

    def __init__(self, floor: int) -> None:
        super().__init__(floor, floor // 5, floor // 40)

    def settled(self, requested: int, twice: int, *, probed: bool) -> None:
        """A half is over that requested so many rows.

        Args:
            requested: rows.
            twice: rows that ever came a second time by a request.
            probed: a probe timeout has expired, which may be what made them come twice.
        """
        new = twice - self.twice
        self.twice = twice
        if 2 * new > requested and not probed:
            self.window = min(self.floor, 2 * self.window)
        else:
            self.window = max(self.floor // 40, self.window - self.window // 16)


class Repairs:
    """What a rank keeps about repair beside its ops: what others ask for, and what answers have taught.

    Raises:
        MemoryError: there is none.
    """

    def __init__(self, ranks: int, floor: int = FLOOR) -> None:
        #: what the library says of rows that others ask for, and what it keeps of them (``host_lib/core/answers.c``)
        self.asking = Asking()
        self.asked = core().fast.tb_asked_open(ctypes.byref(self.asking))
        if not self.asked:
            raise MemoryError("no memory for requests of other ranks")
        weakref.finalize(self, core().fast.tb_asked_close, self.asked).atexit = False  # the transport may be at work
        #: what requests have taught, by the rank that they went to
        kind: Any = Path
        self.paths: Sequence[Path] = (kind * ranks)(*(Path(floor) for _ in range(ranks)))
        #: rows asked for that came, by the rank that was asked: contributions and results
        self.came = np.zeros((2, ranks), np.int64)


def encode_repair(places: NDArray[np.int64], width: int) -> list[tuple[int, bytes]]:
    """(``row``, body) of the REPAIR packets that ask for ``places`` (i64[], rising), at most ``width`` bytes each."""
    out, at, left, size = [], address(places), len(places), ctypes.c_uint32()
    body = ctypes.create_string_buffer(width)
    while left:
        first = ctypes.c_int64.from_address(at).value
        taken = core().fast.tb_bitmap(at, left, body, width, ctypes.byref(size))
        out.append((first, body.raw[: size.value]))
        at, left = at + 8 * taken, left - taken
    return out
