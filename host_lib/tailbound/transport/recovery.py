"""Loss detection within a flow, and requests for lost rows (clock-23). Pure state, with the time passed in, ns.

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

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Places in a flow's order of sending, rising.
Places = NDArray[np.int64]
#: A time that does not come.
NEVER = 1 << 62
#: Probes without an answer after which a flow may be given up: one of them, or its answer, may be lost, too.
_PROBES = 2
#: A probe timeout doubles this many times at most.
_DOUBLED = 6
#: Senders that are asked for their marks together, in turn; before a deadline all are.
AT_ONCE = 8
#: A flow of so few rows may well be lost as a whole: for the first question of a half its sender counts as one that has
#: begun. With many ranks all flows are short, and late senders would be asked as often as those that lost a tail.
SHORT = 3


class Path:
    """What requests to one peer have taught: the time of an answer (RFC 9002 section 5.3), and how far rows overtake.

    Args:
        floor: the shortest deadline.

    Attributes:
        window: the reordering window. It doubles where more than half of the requested rows came twice, and shrinks
            slowly where fewer did.
    """

    def __init__(self, floor: int) -> None:
        self._least, self._most = floor // 10, 5 * floor
        self._usual = self._varies = 0.0
        self._guess = 2 * self._least  # until an answer comes: the probe timeout
        self.window = self._narrow = floor // 40
        self._wide = floor
        self._twice = 0

    @property
    def pto(self) -> int:
        """The probe timeout: a fifth of the floor before the first answer, then at least a tenth of it."""
        if self._guess:
            return self._guess
        return min(self._most, max(self._least, int(self._usual + 4 * self._varies)))

    def answered(self, took: int, first: int = 0) -> None:
        """An answer came ``took`` after its request, and ``first`` after the first one of several.

        After less than half of the usual time it answers an earlier one.
        """
        if self._guess or 2 * took < self._usual:
            took = max(took, first)
        self._guess = 0
        if not self._usual:
            self._usual, self._varies = float(took), took / 2
            return
        self._varies += (abs(self._usual - took) - self._varies) / 4
        self._usual += (took - self._usual) / 8

    def unanswered(self) -> None:
        """A flow was given up before an answer came: the next one is waited for twice as long."""
        self._guess = min(self._most, 2 * self.pto)

    def settled(self, requested: int, twice: int, *, probed: bool) -> None:
        """A half is over that requested so many rows.

        Args:
            requested: rows.
            twice: rows that ever came a second time by a request.
            probed: a probe timeout has expired, which may be what made them come twice.
        """
        new, self._twice = twice - self._twice, twice
        if 2 * new > requested and not probed:
            self.window = min(self._wide, 2 * self.window)
        else:
            self.window = max(self._narrow, self.window - self.window // 16)


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


class Incoming(NamedTuple):
    """A flow as its receiver sees it.

    Attributes:
        rank: the sender.
        rows: of the flow.
        first: place in the list that the flow begins with; the flow wraps there.
        ended: the sender's mark says that all rows have left.
    """

    rank: int
    rows: int
    first: int
    ended: bool


class Silence(NamedTuple):
    """By what all flows of a half wait for marks.

    Attributes:
        floor: the shortest deadline.
        last: when a row of any of them came last.
        call: when there is still time for an answer before the deadline; ``NEVER``: that is not known.
        rounds: how often some were asked in this half.
    """

    floor: int
    last: int
    call: int
    rounds: int


class Flow:
    """Loss detection of one flow; ``rows`` and ``first`` as for ``Incoming``.

    Attributes:
        due: when to look next.
        mark: when to ask its sender for the mark.
        ended: when the mark was noticed; 0: it was not.
        over: nothing more is requested.
    """

    __slots__ = (
        "_asked", "_called", "_came", "_expired", "_first", "_highest", "_moved", "_next", "_noted", "_order", "_out",
        "_passed", "_since", "due", "ended", "first", "mark", "moved", "over", "probed", "questions", "rows",
    )  # fmt: skip

    def __init__(self, rows: int, first: int) -> None:
        self.rows, self.first = rows, first
        self.due = self.ended = 0
        self.over = False
        self._order: Places = np.arange(rows)  # of expected arrival
        self._next = rows
        self._passed = self._highest = -1, -1  # places that count as passed, and those that will after the window
        self._noted = 0  # when ``_highest`` was seen
        self._out: NDArray[np.bool_] = np.zeros(rows, bool)  # requested, and not here
        # when each row was requested first and last
        self._first: NDArray[np.int64] = np.zeros(rows, np.int64)
        self._asked: NDArray[np.int64] = np.zeros(rows, np.int64)
        self.probed = False  #: a probe timeout has expired
        self._since = self._expired = 0  # the last progress, and probe timeouts since then
        self.mark = NEVER
        self.moved = 0  #: when the last row came
        self._came = self._moved = 0  # rows here, and when the last came, or its sender was to be asked
        self.questions = 0  #: since the last row
        self._called = -NEVER  # when its sender was asked last since a deadline was near

    @property
    def requested(self) -> Places:
        """Rows that were requested, in list order."""
        return np.sort((np.flatnonzero(self._first) + self.first) % max(1, self.rows))

    def detect(self, here: NDArray[np.bool_], now: int, path: Path, bounds: Bounds) -> Places:
        """Returns the rows to request now, in the order of sending.

        Args:
            here: bool[rows], which rows have arrived, in the order of sending.
            now: the time.
            path: of the sender.
            bounds: of the half.
        """
        missing = ~here
        self._note_answers(here, now, path)
        if not missing.any():
            self.over = bool(self.ended)
            self.due = now + bounds.step
            return np.flatnonzero(missing)
        window = 0 if bounds.late else path.window
        lost = self._pass(here, missing, now, window)
        waits = bool(self._out.any())
        if waits and now >= self._timeout(path):
            self._expired += 1
            self.probed = True
            lost |= self._out
        idle = now - max(self._since, self.ended) >= bounds.patience
        if self.ended and waits and idle and self._expired > _PROBES:
            self.over = True
            path.unanswered()
            return np.zeros(0, np.int64)
        self.due = now + (bounds.look if waits or self.ended else bounds.step)
        if self._noted and (missing & self._behind(self._highest)).any():
            self.due = min(self.due, self._noted + window)
        if waits:
            self.due = min(self.due, self._timeout(path))
        return np.flatnonzero(lost)

    def silent(self, here: NDArray[np.bool_], now: int, path: Path, silence: Silence) -> bool:
        """Whether the sender is to be asked for the mark, which has not come; notes when (``mark``).

        Args:
            here, now, path: as for ``detect``.
            silence: of the half.
        """
        came = int(np.count_nonzero(here))
        if came != self._came:
            self._came, self.questions = came, 0
            self._moved = self.moved = now
        self._await(path, silence)
        return now >= self.mark

    def ask(self, now: int, path: Path, silence: Silence, *, asked: bool) -> None:
        """The sender, whose turn it is, is ``asked`` for the mark, or others are; see ``silent``."""
        self._moved = now
        self.questions += asked
        if asked and now >= silence.call:
            self._called = now
        self._await(path, silence)

    def _await(self, path: Path, silence: Silence) -> None:
        soon, late = 2 * silence.floor // 5, 2 * silence.floor
        # while rows of others come, a sender of which nothing has come is not missed
        since = self._moved if self._came else max(self._moved, silence.last)
        asked = self.questions if self._came else max(self.questions, silence.rounds)
        begun = self._came or (self.rows <= SHORT and not asked)
        first = max(path.pto, soon) if begun else late
        usual = since + min(first << min(asked, _DOUBLED), 8 * late)
        # a deadline that has moved on is another one
        self.mark = min(usual, max(silence.call, since + soon, self._called + late))

    def request(self, places: Places, now: int, path: Path, bounds: Bounds) -> None:
        """``places`` are requested now."""
        self._order[places] = np.arange(self._next, self._next + len(places))
        self._next += len(places)
        self._out[places], self._asked[places] = True, now
        self._first[places[self._first[places] == 0]] = now
        self._since = self._since or now
        self.due = min(now + bounds.look, self._timeout(path))

    def _note_answers(self, here: NDArray[np.bool_], now: int, path: Path) -> None:
        came = self._out & here
        if not came.any():
            return
        # while a flow runs, answers wait in its queues
        after = came & (self._first >= (self.ended or NEVER))
        if after.any():
            path.answered(now - int(self._asked[after].max()), now - int(self._first[after].max()))
        self._out &= ~here
        self._since, self._expired = now, 0

    def _pass(self, here: NDArray[np.bool_], missing: NDArray[np.bool_], now: int, window: int) -> NDArray[np.bool_]:
        """Rows that a row behind them has passed for the reordering window.

        A retransmission overtakes rows that have not left yet, so it passes retransmissions only.
        """
        if self._noted and now - self._noted >= window:
            self._passed, self._noted = self._highest, 0
        seen, rows = self._order[here], self.rows
        highest = rows - 1 if self.ended else int(seen[seen < rows].max(initial=-1)), int(seen.max(initial=-1))
        if not self._noted and highest != self._passed:
            self._highest, self._noted = highest, now
            if not window:
                self._passed, self._noted = highest, 0
        return missing & self._behind(self._passed)

    def _behind(self, highest: tuple[int, int]) -> NDArray[np.bool_]:
        """Rows whose place is at most ``highest``: among rows that left once, and among retransmissions."""
        order = self._order
        return (order <= highest[0]) | ((order >= self.rows) & (order <= highest[1]))

    def _timeout(self, path: Path) -> int:
        if not self.ended:
            return NEVER  # later rows tell what is lost
        return int(self._asked[self._out].max(initial=0)) + (path.pto << min(self._expired, _DOUBLED))


class Recovery:
    """Loss detection of all flows of one half of one op."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._rounds = 0  # how often senders were asked for their marks
        self.flows: dict[int, Flow] = {}
        self._left: set[int] = set()  # senders whose rows are not awaited now; a suspect may come back

    @property
    def open(self) -> bool:
        """Whether a flow has ended, and its missing rows may still come."""
        return any(flow.ended and not flow.over for flow in self._awaited())

    @property
    def standing(self) -> tuple[bool, int]:
        """``open``, and how many flows have ended and are over: when either changes, the half may end."""
        return self.open, sum(flow.ended > 0 and flow.over for flow in self.flows.values())

    @property
    def due(self) -> int:
        """When to call ``poll`` again; ``NEVER``: when a flow begins."""
        return min((min(flow.due, flow.mark) for flow in self._awaited() if not flow.over), default=NEVER)

    @property
    def requested(self) -> dict[int, Places]:
        """Rows that were requested, in list order, by sender."""
        found = {rank: flow.requested for rank, flow in self.flows.items()}
        return {rank: places for rank, places in found.items() if len(places)}

    def over(self, rank: int) -> bool:
        """Whether nothing more is requested of ``rank``."""
        return rank in self.flows and (self.flows[rank].over or rank in self._left)

    def _awaited(self) -> list[Flow]:
        return [flow for rank, flow in self.flows.items() if rank not in self._left]

    def gone(self, rank: int) -> None:
        """``rank`` has said that no more of this op will come."""
        if rank in self.flows:
            self.flows[rank].over = True

    def poll(
        self,
        now: int,
        senders: Iterable[Incoming],
        here: Callable[[Incoming], NDArray[np.bool_]],
        paths: Callable[[int], Path],
        *,
        asks: bool = False,
        deadline: int = 0,
    ) -> tuple[list[tuple[int, Places]], list[int]]:
        """What to ask for now.

        Args:
            now: the time.
            senders: flows whose rows are awaited now.
            here: which rows of a flow have arrived, bool[rows] in the order of sending.
            paths: by rank.
            asks: whether marks may be asked for.
            deadline: that ends the half; 0: not known.

        Returns:
            Which rows to request of which sender, in list order, and whom to ask for the mark.
        """
        requests, awaited, floor = [], set(), self._bounds.floor
        silent: list[int] = []
        last = max((max(flow.moved, flow.ended) for flow in self.flows.values()), default=0)
        silence = Silence(floor, last, deadline - 3 * floor // 5 if deadline else NEVER, self._rounds)
        for sender in senders:
            awaited.add(sender.rank)
            flow = self.flows.get(sender.rank)
            if flow is None:
                flow = self.flows[sender.rank] = Flow(sender.rows, sender.first)
                flow.due = now + self._bounds.step
                if asks:
                    flow.ask(now, paths(sender.rank), silence, asked=False)
            if sender.ended and not flow.ended:
                flow.ended, flow.due, flow.mark = now, now, NEVER
            if flow.over or now < min(flow.due, flow.mark):
                continue
            arrived, path = here(sender), paths(sender.rank)
            if asks and not flow.ended and flow.silent(arrived, now, path, silence):
                silent.append(sender.rank)
            lost = flow.detect(arrived, now, path, self._bounds)
            if not len(lost):
                continue
            if not self._bounds.patience:
                flow.over = bool(flow.ended)
                continue
            flow.request(lost, now, path, self._bounds)
            requests.append((sender.rank, np.sort((lost + sender.first) % sender.rows)))
        self._left = self.flows.keys() - awaited
        silent.sort(key=lambda rank: self.flows[rank].questions)
        asked = silent if now >= silence.call else silent[:AT_ONCE]
        self._rounds += bool(asked)
        silence = silence._replace(rounds=self._rounds)
        for rank in silent:
            self.flows[rank].ask(now, paths(rank), silence, asked=rank in asked)
        return requests, asked
