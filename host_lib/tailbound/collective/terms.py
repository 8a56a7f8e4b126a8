"""What the library decides about ops by (``host_lib/core/halves.c``), and what it keeps of requests (``answers.c``)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from tailbound.datapath.protocol import Store
from tailbound.kernel.core import address, core
from tailbound.transport.config import FLOOR, Config
from tailbound.transport.overtime import Overtime
from tailbound.wire.packets import record_of
from tailbound.wire.schema import ANSWERS, ASKING, TERMS

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


class Terms(record_of(TERMS)):  # type: ignore[misc]
    """``tb_terms`` of one rank.

    Args:
        config: settings.
        world: ranks, a switch included.
        cookie: of the job.
        store: of the datapath.
        overtime: what may be waited past deadlines.
        paths: what requests have taught, by rank.

    Attributes:
        heard: when a word of each rank was last read, ns; 0: never.
    """

    def __init__(
        self, config: Config, world: int, cookie: int, store: Store, overtime: Overtime, paths: Sequence[Path]
    ) -> None:
        memory: Any = paths
        self.heard = (ctypes.c_int64 * world)()
        self._kept = store, overtime, memory
        super().__init__(
            address(store.control), address(store.peer_states), address(store.ops), address(store.slots),
            address(store.presence), address(store.result_records), 0, ctypes.addressof(memory),
            ctypes.addressof(overtime), ctypes.addressof(self.heard), ctypes.addressof(overtime.open),
            stage_max=config.stage_max, insist=config.insist, floor=config.floor, cookie=cookie, rank=config.rank,
            ranks=config.ranks, world=world, sum_mask=store.sum_rows - 1, result_mask=store.result_rows - 1,
            repair=config.repair,
        )  # fmt: skip
        self.pointer = ctypes.addressof(self)
