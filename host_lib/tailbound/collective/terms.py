"""What the library decides about ops by (``host_lib/core/halves.c``), and what it keeps of requests (``answers.c``).

A deadline moves on, and what waiting past it may cost is a small share of the training time (clock-7c, clock-29).
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from tailbound.datapath.protocol import Store
from tailbound.kernel.core import address, core
from tailbound.transport.config import FLOOR, MS, Config
from tailbound.wire.packets import record_of
from tailbound.wire.schema import ANSWERS, KEPT_ANSWERS, MAX_RANKS, OVERTIME, TERMS

#: Part of the time that waiting past deadlines may take, what is saved up of it at most, and what there is to begin
#: with; with another floor of deadlines in proportion to that.
SHARE, MOST, FIRST = 0.1, 1000 * MS, 500 * MS
#: Of it what rows that are asked for again leave for ranks of which more is missing: a per cent of losses in every op
#: would use it up.
RESERVE = MOST // 2
#: How long answers and waits for a core last at most: after more a rank was stopped, which says nothing about the next
#: time.
LONGEST = 400 * MS
#: Part of the floor that the reordering window has at first, and at least.
_NARROW = 250


class Path(record_of(ANSWERS)):  # type: ignore[misc]
    """What requests to one peer have taught: the time of an answer, and how far rows overtake (``tb_answers``).

    Args:
        floor: the shortest deadline.
    """

    window: int
    twice: int

    def __init__(self, floor: int) -> None:
        super().__init__(floor, floor // 5, floor // _NARROW)

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
            self.window = max(self.floor // _NARROW, self.window - self.window // 16)


class Repairs:
    """What a rank keeps about repair beside its ops: what others ask for, and what answers have taught.

    Raises:
        MemoryError: there is none.
    """

    def __init__(self, ranks: int, floor: int = FLOOR) -> None:
        #: what the library keeps of rows that others ask for (``host_lib/core/answers.c``)
        self.asked = core().fast.tb_asked_open(ranks)
        if not self.asked:
            raise MemoryError("no memory for requests of other ranks")
        weakref.finalize(self, core().fast.tb_asked_close, self.asked).atexit = False  # the transport may be at work
        #: what requests have taught, by the rank that they went to: for contributions, then for results. Answers of the
        #: first kind wait behind the results of a rank that has sealed its rows
        kind: Any = Path * (2 * ranks)  # type: ignore[operator]
        self.paths: Sequence[Path] = kind.from_buffer_copy(bytes(Path(floor)) * (2 * ranks))


class Overtime(record_of(OVERTIME)):  # type: ignore[misc]
    """One rank's balance of waiting past deadlines, and how long ranks that live say nothing (``tb_overtime``).

    A deadline follows what ops usually take. An op takes longer where threads wait for a core, or a neighbour takes the
    processors away for a moment. Nothing is lost by that, and its rows are worth more than a short tail. So a deadline
    moves on while rows come, or while a missing rank may still live, and every rank keeps a balance. ``SHARE`` of the
    time that passes is saved up, at most ``MOST``, and what ops have waited past their deadlines is taken off. A link
    that stays slow, or a rank that is late in every step, uses it up once.

    Marks that rise and words tell that a rank lives; a missing one is asked for a word (``core/words.c``). A rank
    that waits for a core is as silent as one that was stopped. So the longest silence is learned from questions that
    ranks have left open, and from the own thread's waits for a core. Where these are milliseconds, a rank that was
    stopped costs half a deadline and no more. Questions are rare, and own waits are seen in every op; hosts of one job
    are busy alike, as a rule.

    Args:
        now: the time, ns; saving begins.
        floor: see ``Config``.

    Attributes:
        open: by rank, since when it has left a question open, ns; 0: it has not.
        held_up: ns that the own thread has waited for Python's interpreter lock (GIL) in all, with ops on their way.
    """

    waited: int
    answer: int
    lack: int
    lacked: int
    latest: int

    def __init__(self, now: int, floor: int = FLOOR) -> None:
        super().__init__(floor, MOST * floor // FLOOR, RESERVE * floor // FLOOR, FIRST * floor / FLOOR, now)
        self.share, self.longest = SHARE, LONGEST
        self.held_up = 0
        self.open = (ctypes.c_int64 * (MAX_RANKS + 1))()
        self._lacks: deque[int] = deque(maxlen=KEPT_ANSWERS)

    def woke(self, late: int) -> None:
        """The own thread woke up ``late`` ns after the time that it had asked for."""
        core().fast.tb_woke(ctypes.addressof(self), late)

    def ended(self) -> None:
        """An op has ended."""
        self._lacks.append(min(LONGEST, self.latest))
        self.lack, self.latest = max(self._lacks), 0


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
            stage_max=config.stage_max, insist=config.insist, floor=config.floor, deadline_1=config.deadline_1,
            cookie=cookie, rank=config.rank, ranks=config.ranks, world=world, sum_mask=store.sum_rows - 1,
            result_mask=store.result_rows - 1,
        )  # fmt: skip
        self.pointer = ctypes.addressof(self)
