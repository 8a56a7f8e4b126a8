"""Loss detection within a flow, and requests for lost rows (clock-23). Times are passed in, ns.

A flow is the rows of one op from one sender to one receiver, in an order that both know. A row is lost when a row
behind it arrived a reordering window ago. The receiver requests lost rows while the flow still runs. A requested row
takes a new place behind all others, so that a lost retransmission is detected like a lost row.

Only the end of a flow needs a timer, the probe timeout (PTO, RFC 9002 section 6.2) of its sender. It doubles with each
expiry, and returns to its length when a row arrives. If the last row was lost, and with it the mark that says that
nothing more will come, the sender is asked for its mark (clock-30).

Who has not begun is computing, as a rule: it is asked late and ever more rarely, and once more shortly before the
deadline, to say that it lives. Of many senders whose marks are missing nearly all are late, so few are asked together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.kernel.core import address, core
from tailbound.wire.packets import dtype_of, record_of
from tailbound.wire.schema import ANSWERS, AWAITED, HALF, INCOMING

#: Places in a flow's list, rising.
Places = NDArray[np.int64]
#: A time that does not come.
NEVER = 1 << 62
_ROW = dtype_of(AWAITED)
_Half = record_of(HALF)


class Path(record_of(ANSWERS)):  # type: ignore[misc]
    """What requests to one peer have taught: the time of an answer, and how far rows overtake (``tb_answers``).

    Args:
        floor: the shortest deadline.

    Attributes:
        window: the reordering window. It doubles where more than half of the requested rows came twice, and shrinks
            slowly where fewer did.
    """

    window: int
    twice: int

    def __init__(self, floor: int) -> None:
        super().__init__(floor, floor // 5, floor // 40)

    @property
    def pto(self) -> int:
        """The probe timeout: a fifth of the floor before the first answer, then a tenth of it to five."""
        return int(core().fast.tb_pto(ctypes.addressof(self)))

    def answered(self, took: int, first: int = 0) -> None:
        """An answer came ``took`` after its request, and ``first`` after the first one of several.

        Where there were several, it may be to any of them: it took the usual time and twice what that varies, within
        these bounds.
        """
        core().fast.tb_answered(ctypes.addressof(self), took, first)

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


def paths(ranks: int, floor: int) -> Sequence[Path]:
    """Those of so many peers, in one piece of memory."""
    found: Sequence[Path] = _array(Path, ranks)(*(Path(floor) for _ in range(ranks)))
    return found


def _array(kind: Any, count: int) -> Any:
    return kind * count


class Bounds(NamedTuple):
    """What one half of an op allows, in rows and ns.

    Attributes:
        patience: how long a flow that has ended is waited for while no requested row arrives; 0: none is requested.
        late: the launch came after the deadline, so that no row is waited for before it is requested.
        step: the time between two looks at a flow that runs.
        look: the time between two looks at a flow with requested rows.
        floor: the shortest deadline.
    """

    patience: int
    late: bool
    step: int
    look: int
    floor: int


class Ring(NamedTuple):
    """Where the rows of a half arrive.

    Attributes:
        slots: address of the slots of contributions; 0: they are results.
        presence: address of the presence of results; 0: they are contributions.
        mask: entries less one.
        seq: of the first row.
        op, cookie: what marks rows of the op.
    """

    slots: int
    presence: int
    mask: int
    seq: int
    op: int
    cookie: int


class Incoming(NamedTuple):
    """A flow as its receiver sees it.

    Attributes:
        rank: the sender.
        rows: of the flow.
        first: place in the list that the flow begins with; the flow wraps there.
        ended: the sender's mark says that all rows have left.
        places: of results, rows of the op in list order, i32[rows]; None: contributions.
    """

    rank: int
    rows: int
    first: int
    ended: bool
    places: NDArray[np.int32] | None = None


class Flow(record_of(INCOMING)):  # type: ignore[misc]
    """Loss detection of one flow (``tb_incoming``)."""

    def begin(self, sender: Incoming) -> None:
        """It is that of ``sender``."""
        self.rank, self.rows, self.first, self._places = sender.rank, sender.rows, sender.first, sender.places
        self.table = np.zeros(sender.rows, _ROW)
        self.row = address(self.table)
        self.listed = 0 if sender.places is None else address(sender.places)

    @property
    def requested(self) -> Places:
        """Rows that were requested."""
        return np.sort((np.flatnonzero(self.table["place"]) + self.first) % max(1, self.rows))


class Recovery:
    """Loss detection of all flows of one half of one op.

    Args:
        bounds: of the half.
        ring: where its rows arrive.
        paths: by rank.
    """

    def __init__(self, bounds: Bounds, ring: Ring, paths: Sequence[Path]) -> None:
        self._memory, self._paths, self._core = _array(Flow, len(paths))(), paths, core().fast
        memory: Any = paths
        self._half = _Half(
            ctypes.addressof(self._memory), ctypes.addressof(memory), ring.slots, ring.presence, bounds.patience,
            bounds.step, bounds.look, bounds.floor, NEVER, 0, *ring[2:], late=bounds.late,
        )  # fmt: skip
        self._at = ctypes.addressof(self._half)
        self.flows: dict[int, Flow] = {}

    @property
    def open(self) -> bool:
        """Whether a flow has ended, and its missing rows may still come."""
        return bool(self._half.open)

    @property
    def standing(self) -> tuple[bool, int]:
        """``open``, and how many flows have ended and are over: when either changes, the half may end."""
        return self.open, self._half.closed

    @property
    def due(self) -> int:
        """When to call ``poll`` again; ``NEVER``: when a flow begins."""
        return int(self._half.due)

    @property
    def requested(self) -> dict[int, Places]:
        """Rows that were requested, in list order, by sender."""
        return {rank: flow.requested for rank, flow in self.flows.items() if flow.next > flow.rows}

    def over(self, rank: int) -> bool:
        """Whether nothing more is requested of ``rank``."""
        flow = self.flows.get(rank)
        return flow is not None and bool(flow.over or not flow.awaited)

    def gone(self, rank: int, places: Places) -> None:
        """``rank`` has none of these rows: they are not awaited."""
        if (flow := self.flows.get(rank)) is not None and len(places) and places[-1] < flow.rows:
            flow.table["gone"][(places - flow.first) % flow.rows] = True
            flow.due = 0
            self._core.tb_half_stands(self._at)

    def poll(
        self, now: int, senders: Iterable[Incoming], *, asks: bool = False, deadline: int = 0
    ) -> tuple[list[tuple[int, Places]], list[int]]:
        """What to ask for now.

        Args:
            now: the time.
            senders: flows whose rows are awaited now.
            asks: whether marks may be asked for.
            deadline: that ends the half; 0: not known.

        Returns:
            Which rows to request of which sender, in list order, and whom to ask for the mark.
        """
        flows = self.flows
        for flow in flows.values():
            flow.awaited = 0
        for sender in senders:
            if (found := flows.get(sender.rank)) is None:
                found = flows[sender.rank] = self._memory[len(flows)]
                found.begin(sender)
            found.awaited, found.finished = 1, sender.ended
        self._half.count = len(flows)
        if not self._core.tb_recover(self._at, now, asks, deadline):
            return [], []
        requests = [(rank, self._lost(flow)) for rank, flow in flows.items() if flow.requests]
        return requests, [rank for rank, flow in flows.items() if flow.asked]

    def _lost(self, flow: Flow) -> Places:
        places = np.empty(flow.requests, np.int64)
        self._core.tb_requests(ctypes.addressof(flow), places.ctypes.data)
        return places
